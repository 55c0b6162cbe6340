"""`turnrl index build | info | search`: build, describe and search indexes."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import random
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, get_args

from turnrl import Question, RecipeError
from turnrl.data.fields import Fields
from turnrl.data.files import FILE_KINDS
from turnrl.plugin.text import format_count, make_visible, say
from turnrl.rewards.answers import contains_answer
from turnrl_wiki_search import elastic
from turnrl_wiki_search.index import Analyzer, Hit, SearchIndex, clean_query
from turnrl_wiki_search.settings import Elasticsearch, Embedded, IndexSettings, parse_index
from turnrl_wiki_search.sources import make_object, open_corpus
from turnrl_wiki_search.splitting import Splitter

if TYPE_CHECKING:
    Commands = argparse._SubParsersAction[argparse.ArgumentParser]

_RANKS = (1, 3, 5)


def add_index_command(commands: Commands) -> None:
    """Add `index` to argparse's sub-parsers."""
    parser = commands.add_parser(
        "index", help="build, describe and ask search indexes", description=__doc__
    )
    actions = parser.add_subparsers(dest="action", required=True, metavar="{build,info,search}")
    _add_build(_add_action(actions, _build, "build an index"))
    _add_action(actions, _info, "describe an index")
    summary = "search for a query, or score retrieval on questions with answers"
    _add_search(_add_action(actions, _search, summary))


def _add_action(
    actions: Commands, run: Callable[[argparse.Namespace], None], summary: str
) -> argparse.ArgumentParser:
    parser = actions.add_parser(run.__name__.strip("_"), help=summary)
    parser.set_defaults(run=run)
    parser.add_argument(
        "--index",
        required=True,
        help="what WikiSearch.index is in a recipe: a folder, the address of a server's /retrieve, "
        "or '{class_path: Elasticsearch, init_args: {name: wikipedia}}'",
    )
    return parser


def _add_build(build: argparse.ArgumentParser) -> None:
    build.add_argument(
        "--source",
        required=True,
        help=f"a file with id, title and text (*{', *'.join(FILE_KINDS)}); an installed "
        "corpus, such as Atlas, or one with settings, '{class_path: HotpotParagraphs, init_args: "
        "{limit: 5000}}'; a folder with a data set's files; or a hub data set, "
        "NAME[:CONFIG[:SPLIT]], such as wikimedia/wikipedia",
    )
    build.add_argument(
        "--split",
        help="words=N cuts articles into passages of about N words at sentence ends; none leaves "
        "texts as they are (default: words=100 for a hub data set, otherwise none)",
    )
    build.add_argument(
        "--analyzer",
        choices=get_args(Analyzer),
        default="english",
        help="english drops stop words and stems; standard does neither (default: %(default)s)",
    )
    build.add_argument("--overwrite", action="store_true", help="replace an existing index")


def _add_search(search: argparse.ArgumentParser) -> None:
    search.add_argument("query", nargs="?", help="the words to search for")
    search.add_argument(
        "--questions",
        metavar="SOURCE",
        help="a file with 'question' and 'answers', or any data set that a recipe's data.val can "
        "name",
    )
    search.add_argument(
        "--sample", type=int, metavar="N", help="use N of the questions, the same ones each time"
    )
    search.add_argument("-k", type=int, default=3, help="passages per query (default: 3)")


def _settings(text: str) -> IndexSettings:
    """The index that `--index` names. A command does not wait for its server."""
    if not text.lstrip().startswith("{"):
        index = parse_index(text)
    else:
        example = "{class_path: Elasticsearch, init_args: {name: wikipedia}}"
        index = make_object(text, IndexSettings, example)  # type: ignore[type-abstract]
    return index if isinstance(index, Embedded) else dataclasses.replace(index, wait_s=0.0)  # type: ignore[type-var]


def _open(args: argparse.Namespace) -> contextlib.closing[SearchIndex]:
    return contextlib.closing(_settings(args.index).open())


def _build(args: argparse.Namespace) -> None:
    index = _settings(args.index)
    splitter = None if args.split is None else Splitter.parse(args.split)
    if not isinstance(index, Embedded | Elasticsearch):
        raise RecipeError(f"--index {args.index!r} is a server with an index of its own.")
    corpus = open_corpus(args.source, splitter)
    began = time.monotonic()
    if isinstance(index, Embedded):
        from turnrl_wiki_search import embedded  # loads tantivy

        existing: embedded.Existing = "replace" if args.overwrite else "refuse"
        info = embedded.build(index.folder, corpus, args.analyzer, existing)
    else:
        info = elastic.build(index, corpus, args.analyzer, args.overwrite)
    seconds = time.monotonic() - began
    say(f"{info.index}: {info.passages:,} passages from {info.source} in {seconds:.1f} s, counted")


def _info(args: argparse.Namespace) -> None:
    with _open(args) as index:
        fields = dataclasses.asdict(index.info())
    shown = {name: "unknown" if value is None else value for name, value in fields.items()}
    text = "\n".join(f"{name:9} {value}" for name, value in shown.items())
    say(make_visible(text), indent=" " * 10)


def _search(args: argparse.Namespace) -> None:
    if (args.query is None) == (args.questions is None):
        raise RecipeError("turnrl index search takes either a query or --questions SOURCE.")
    if args.k < 1:
        raise RecipeError(f"-k is {args.k}; it must be 1 or more.")
    if args.questions is not None:
        _score(args)
        return
    query = clean_query(args.query)
    if not query:
        raise RecipeError("the query is empty. Give some words to look for.")
    with _open(args) as index:
        (hits,) = index.search([query], args.k)
    say(make_visible("\n\n".join(map(_shown, hits))), indent="")
    if not hits:
        print(f"nothing found for {query!r}", file=sys.stderr)


def _shown(hit: Hit) -> str:
    score = "" if hit.score is None else f"{hit.score:.4g}  "
    return f"{score}{hit.passage.title}  [{hit.passage.id}]\n{hit.passage.text}"


def _score(args: argparse.Namespace) -> None:
    from turnrl import load_questions

    # questions in a file need no ids here, because nothing is stored about them
    fields = Fields(id=None) if Path(args.questions).is_file() else None
    questions = load_questions(args.questions, fields=fields)
    if args.sample is not None:
        if not 1 <= args.sample <= len(questions):
            raise RecipeError(
                f"--sample {args.sample}: {args.questions} has {len(questions)} questions."
            )
        random.Random(0).shuffle(questions)
        questions = questions[: args.sample]
    with _open(args) as index:
        score, info = score_retrieval(index, questions, args.k), index.info()
    held = "its passages" if info.passages is None else format_count(info.passages, "passage")
    say(f"{format_count(len(questions), 'question')} over {held}")
    for name, value in score.items():
        print(f"{name:10} {value:.3f}")


def score_retrieval(index: SearchIndex, questions: Sequence[Question], k: int) -> dict[str, float]:
    """Search for each question's text, and compute the share with an answer in the best passages.

    An accepted answer counts if its words stand, whole and in order, in the title and text of a
    passage, both normalised as SQuAD does.

    Args:
        index: The index to search.
        questions: The questions; their texts are the queries.
        k: Passages per question.
    Returns:
        `answer@n` for n of 1, 3, 5 and k, up to k.
    """
    ranks = sorted({n for n in (*_RANKS, k) if n <= k})
    answered = dict.fromkeys(ranks, 0)
    answers = index.search([clean_query(question.text) for question in questions], k)
    for question, hits in zip(questions, answers, strict=True):
        texts = (f"{hit.passage.title}\n{hit.passage.text}" for hit in hits)
        found = (n for n, text in enumerate(texts, 1) if contains_answer(text, question))
        rank = next(found, k + 1)
        for n in ranks:
            answered[n] += rank <= n
    return {f"answer@{n}": count / len(questions) for n, count in answered.items()}
