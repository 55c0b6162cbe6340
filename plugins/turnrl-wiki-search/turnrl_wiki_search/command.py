"""`turnrl index build | info | search | check`: build, describe, search and check indexes."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import random
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

from turnrl import (
    Fields,
    Question,
    RecipeError,
    answer_rule,
    can_be_found,
    counted,
    say,
    visible,
    whole_file,
)
from turnrl.data.files import FILE_KINDS
from turnrl.data.rows import Names
from turnrl_wiki_search import elastic
from turnrl_wiki_search.coverage import Coverage, coverage, score_retrieval
from turnrl_wiki_search.index import (
    Analyzer,
    Backend,
    Hit,
    IndexInfo,
    Ranking,
    SearchIndex,
    clean_query,
)
from turnrl_wiki_search.progress import Progress
from turnrl_wiki_search.server import OF_RETRIEVE, SearchServer, explained
from turnrl_wiki_search.sources import Corpus, open_pages
from turnrl_wiki_search.splitting import Splitter
from turnrl_wiki_search.tool import open_index

if TYPE_CHECKING:
    Commands = argparse._SubParsersAction[argparse.ArgumentParser]

_SHOWN = 5
"""The most questions without an answer that are printed, and the most answers of each."""
_ACCESS = ("url", "api_key", "username", "password", "cloud_id", "ca_certs")
"""The arguments of `SearchServer` that name a server."""
_SEARCHED = ("fields", "ranking", "encoder", "query_prefix")
"""The arguments of `SearchServer` for its searches."""
_BUILT = ("shards", "k1", "b", "encoder", "passage_prefix")
_SEARCH_NAMES = Names(("--questions",), splits=(), config="", fields="", answers="")
_CHECK_NAMES = dataclasses.replace(_SEARCH_NAMES, splits=("--split",), answers="--answers")
"""The names of the settings of questions in `search` and `check`."""


def add_index_command(commands: Commands) -> None:
    """Add `index` to argparse's sub-parsers."""
    parser = commands.add_parser(
        "index", help="build, describe and ask search indexes", description=__doc__
    )
    actions = parser.add_subparsers(
        dest="action", required=True, metavar="{build,info,search,check}"
    )
    _add_build(_action(actions, _build, "build an index, or resume an interrupted build"))
    _action(actions, _info, "describe an index").add_argument(
        "--json", action="store_true", help="print JSON"
    )
    summary = "search for a query, or score retrieval on questions with answers"
    _add_search(_action(actions, _search, summary))
    summary = "count the questions of a data set that have an answer in the index"
    _add_check(_action(actions, _check, summary))


def _action(
    actions: Commands, run: Callable[[argparse.Namespace], None], summary: str
) -> argparse.ArgumentParser:
    """Add an action with the options of all actions: the index and its server."""
    parser = actions.add_parser(run.__name__.strip("_"), help=summary)
    parser.set_defaults(run=run)
    parser.add_argument(
        "--index",
        required=True,
        help="folder, name of the index on the server, or address of a server's /retrieve",
    )
    backends = [name for name in get_args(Backend) if run is not _build or name != "retrieve"]
    parser.add_argument(
        "--backend", choices=backends, default="embedded", help="default: %(default)s"
    )
    server = parser.add_argument_group("servers", "Quote '${NAME}' on a command line.")
    for name in _ACCESS:
        server.add_argument(f"--{name.replace('_', '-')}", help=explained()[name])
    if run is not _build:
        _add_searched(parser)
    return parser


def _add_searched(parser: argparse.ArgumentParser) -> None:
    how = parser.add_argument_group("how Elasticsearch searches")
    how.add_argument(
        "--fields",
        type=_fields_of,
        metavar="text=NAME[,title=NAME][,vector=NAME]",
        help="the fields of an index that turnrl did not build",
    )
    how.add_argument("--ranking", choices=get_args(Ranking), help=explained()["ranking"])
    for name in ("encoder", "query_prefix"):
        how.add_argument(f"--{name.replace('_', '-')}", help=explained()[name])


def _fields_of(text: str) -> dict[str, str]:
    pairs = [pair.partition("=") for pair in text.split(",")]
    if not all(name and sign and value for name, sign, value in pairs):
        raise argparse.ArgumentTypeError(
            f"{text!r} must look like text=body,title=headline,vector=embedding"
        )
    return {name.strip(): value.strip() for name, _, value in pairs}


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
    build.add_argument("--shards", type=int, help="shards of the index on the server (default: 1)")
    build.add_argument(
        "--k1", type=float, help="BM25's k1 on the server (default: 1.2, as in the embedded index)"
    )
    build.add_argument(
        "--b", type=float, help="BM25's b on the server (default: 0.75, as in the embedded index)"
    )
    build.add_argument(
        "--encoder",
        help="encode the passages for the rankings knn and hybrid, on a GPU if there is one: the "
        "name or folder of a sentence-transformers model, or a function, my_module.encode",
    )
    build.add_argument(
        "--passage-prefix",
        help="put in front of each passage before it is encoded, such as 'passage: '",
    )


def _add_search(search: argparse.ArgumentParser) -> None:
    search.add_argument("query", nargs="?", help="the words to search for")
    _add_questions(search, required=False)
    search.add_argument("-k", type=int, default=3, help="passages per query (default: 3)")
    search.add_argument("--json", action="store_true", help="print JSON")


def _add_questions(parser: argparse.ArgumentParser, required: bool) -> None:
    parser.add_argument(
        "--questions",
        metavar="SOURCE",
        required=required,
        help="a file with 'question' and 'answers', or any data set that a recipe's data.val can "
        "name",
    )
    parser.add_argument(
        "--sample", type=int, metavar="N", help="use N of the questions, drawn with --seed"
    )
    parser.add_argument("--seed", type=int, default=0, help="seed of --sample (default: 0)")


def _add_check(check: argparse.ArgumentParser) -> None:
    _add_questions(check, required=True)
    check.add_argument(
        "--split", help="split of the questions (default: the one that data.val would use)"
    )
    check.add_argument(
        "--limit", type=int, metavar="N", help="use the first N questions; --sample draws from them"
    )
    check.add_argument(
        "--answers", metavar="RULE", help="how answers compare, as data.answers (default: phrase)"
    )
    check.add_argument(
        "-k",
        type=int,
        default=10,
        help="passages per search, before every passage is read (default: 10)",
    )
    check.add_argument(
        "--missing", metavar="FILE", help="write the questions without an answer, as JSON lines"
    )
    check.add_argument("--json", action="store_true", help="print JSON")


def _options(args: argparse.Namespace, names: Sequence[str]) -> dict[str, Any]:
    """The options among `names` that the command line sets.

    Raises:
        RecipeError: If the backend does not have one of them.
    """
    values = {name: getattr(args, name) for name in names if getattr(args, name) is not None}
    allowed = {"embedded": (), "retrieve": OF_RETRIEVE, "elasticsearch": names}[args.backend]
    wrong = [name for name in values if name not in allowed]
    options = ", ".join("--" + name.replace("_", "-") for name in wrong)
    if wrong and args.backend == "embedded":
        raise RecipeError(
            f"{options}: an embedded index has no server, and ranks by BM25 alone. Add --backend "
            "elasticsearch, or leave it out."
        )
    if wrong:
        raise RecipeError(
            f"{options}: the address of a /retrieve server is --index, and it takes no other "
            "settings than --api-key and --ca-certs. Leave it out."
        )
    return values


def _open(args: argparse.Namespace) -> contextlib.closing[SearchIndex]:
    server = SearchServer(**_options(args, (*_ACCESS, *_SEARCHED)), wait_s=0)
    return contextlib.closing(open_index(args.backend, args.index, server, of_run=False))


def _build(args: argparse.Namespace) -> None:
    settings, server = _options(args, _BUILT), SearchServer(**_options(args, _ACCESS))
    if "passage_prefix" in settings and "encoder" not in settings:
        raise RecipeError(
            "--passage-prefix would have no effect, because nothing is encoded. Add --encoder, or "
            "leave it out."
        )
    if "encoder" in settings:
        from turnrl_wiki_search.encoding import open_encoder  # loads numpy

        settings["encoder"] = open_encoder(settings["encoder"])
    splitter = None if args.split is None else Splitter.parse(args.split)
    corpus = Corpus(open_pages(args.source), splitter)
    progress = Progress(corpus.source.fraction)
    if args.backend == "embedded":
        from turnrl_wiki_search import embedded  # loads tantivy

        existing: embedded.Existing = "replace" if args.overwrite else "refuse"
        info = embedded.build(args.index, corpus, args.analyzer, existing, progress)
    else:
        info = elastic.build(
            server, args.index, corpus, args.analyzer, args.overwrite, progress, **settings
        )
    progress.end()
    rate = f", {progress.rate:,.0f} passages/s" if progress.rate else ""
    say(
        f"{info.index}: {info.passages:,} passages from {info.source} in {progress.seconds:.1f} "
        f"s{rate}, counted"
    )


def _info(args: argparse.Namespace) -> None:
    with _open(args) as index:
        fields = dataclasses.asdict(index.info())
    if args.json:
        print(json.dumps(fields))
    else:
        shown = {name: "unknown" if value is None else value for name, value in fields.items()}
        text = "\n".join(f"{name:9} {value}" for name, value in shown.items())
        say(visible(text), indent=" " * 10)


def _search(args: argparse.Namespace) -> None:
    if (args.query is None) == (args.questions is None):
        raise RecipeError("turnrl index search takes either a query or --questions SOURCE.")
    if args.k < 1:
        raise RecipeError(f"-k is {args.k}; it must be 1 or more.")
    if args.questions is not None:
        # questions in a file need no ids here, because nothing is stored about them
        fields = Fields(id=None) if Path(args.questions).is_file() else None
        questions = _read_questions(args.questions, args.sample, args.seed, fields=fields)
        with _open(args) as index:
            _print_score(args, score_retrieval(index, questions, args.k), index.info())
        return
    if args.sample is not None:
        raise RecipeError("--sample draws from questions. Add --questions SOURCE.")
    query = clean_query(args.query)
    if not query:
        raise RecipeError("the query is empty. Give some words to look for.")
    with _open(args) as index:
        (hits,) = index.search([query], args.k)
    if args.json:
        print(json.dumps([{**vars(hit.passage), "score": hit.score} for hit in hits]))
        return
    say(visible("\n\n".join(map(_shown, hits))), indent="")
    if not hits:
        print(f"nothing found for {query!r}", file=sys.stderr)


def _shown(hit: Hit) -> str:
    score = "" if hit.score is None else f"{hit.score:.4g}  "
    return f"{score}{hit.passage.title}  [{hit.passage.id}]\n{hit.passage.text}"


def _check(args: argparse.Namespace) -> None:
    if args.k < 1:
        raise RecipeError(f"-k is {args.k}; it must be 1 or more.")
    if args.limit is not None and args.limit < 1:
        raise RecipeError(f"--limit is {args.limit}; it must be 1 or more.")
    if args.missing is not None and Path(args.missing).is_dir():
        raise RecipeError(f"--missing {args.missing!r} is a folder. Name a file in it.")
    rule = None if args.answers is None else answer_rule(args.answers, _CHECK_NAMES.answers)
    how: dict[str, Any] = {"names": _CHECK_NAMES, "split": args.split, "rule": rule}
    questions = _read_questions(args.questions, args.sample, args.seed, args.limit, **how)
    begin = time.perf_counter()
    with _open(args) as index:
        info = index.info()
        checkable = sum(map(can_be_found, questions))
        if not checkable:
            raise RecipeError(
                f"none of the {len(questions)} questions of {args.questions} can be checked: each "
                "answer is yes or no, occurs in its question, or has a rule that looks for none in "
                "texts. Name other --questions, or another rule with --answers."
            )
        searched = Progress(unit=" questions", total=checkable)
        read = Progress(total=info.passages)
        try:
            result = coverage(index, questions, args.k, searched, read)
        finally:
            searched.end()
            read.end()
    # printed first, because a file that cannot be written should not cost the count
    _print_coverage(args, result, info, time.perf_counter() - begin)
    if args.missing is not None:
        _write_missing(Path(args.missing), result.missing)


def _write_missing(file: Path, missing: Sequence[Question]) -> None:
    rows = [{"id": q.id, "question": q.text, "answers": q.answers} for q in missing]
    try:
        with whole_file(file) as new:
            new.write_text("".join(f"{json.dumps(row)}\n" for row in rows), encoding="utf-8")
    except OSError as error:
        raise RecipeError(
            f"--missing {str(file)!r} cannot be written ({error.strerror}). Choose another file."
        ) from None


def _print_coverage(
    args: argparse.Namespace, result: Coverage, info: IndexInfo, seconds: float
) -> None:
    from scipy import stats

    held, checked = len(result.held), len(result.held) + len(result.missing)
    interval = stats.binomtest(held, checked).proportion_ci(method="wilson")
    low, high = float(interval.low), float(interval.high) if result.whole else None
    if args.json:
        counts = {"held": held, "checked": checked, "unchecked": len(result.unchecked)}
        share = {"share": held / checked, "low": low, "high": high, "whole": result.whole}
        passages = {"passages": info.passages, "scanned": result.scanned, "seconds": seconds}
        print(json.dumps({**counts, **share, **passages}))
        return
    if high is None:
        say(
            f"At least {held} of {checked} questions ({_percent(held / checked)}) have an accepted "
            "answer in the index."
        )
        say(
            f"A /retrieve server cannot be read whole: only the {args.k} best passages of each "
            "search were, so more questions may have one. Raise -k to look at more."
        )
    else:
        say(
            f"{held} of {checked} questions ({_percent(held / checked)}, 95 % interval "
            f"{_percent(low)} to {_percent(high)}) have an accepted answer in the index."
        )
    if result.unchecked:
        say(
            f"{len(result.unchecked)} more cannot be checked: the answer is yes or no, occurs in "
            "the question, or is of a kind that is not looked for in texts."
        )
    say(f"{seconds:.1f} s; {result.scanned:,} of {_counted(info)} read after the searches")
    for question in result.missing[:_SHOWN]:
        answers = "; ".join(question.answers[:_SHOWN])
        say(visible(f"  not found: {question.text!r:.200} ({answers:.100}) [{question.id}]"))
    if len(result.missing) > _SHOWN:
        print(f"  and {len(result.missing) - _SHOWN} more; --missing FILE writes all of them")


def _percent(share: float) -> str:
    return f"{100 * share:.1f} %"


def _counted(info: IndexInfo) -> str:
    return "its passages" if info.passages is None else counted(info.passages, "passage")


def _print_score(args: argparse.Namespace, score: dict[str, float], info: IndexInfo) -> None:
    if args.json:
        print(json.dumps({**score, "passages": info.passages}))
        return
    rate = f"{score.pop('queries_per_s'):,.0f} queries/s"
    say(f"{counted(int(score.pop('questions')), 'question')} over {_counted(info)}, {rate}")
    for name, value in score.items():
        print(f"{name:10} {value:.3f}")


def _read_questions(
    source: str,
    sample: int | None,
    seed: int,
    limit: int | None = None,
    names: Names = _SEARCH_NAMES,
    **how: Any,
) -> list[Question]:
    """The questions of a source; `how` is for `load_questions`."""
    from turnrl import load_questions

    questions = load_questions(source, names=names, **how)[:limit]
    if sample is not None:
        if not 1 <= sample <= len(questions):
            raise RecipeError(f"--sample {sample}: {source} has {len(questions)} questions.")
        random.Random(seed).shuffle(questions)
        questions = questions[:sample]
    return questions
