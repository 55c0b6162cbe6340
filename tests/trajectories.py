"""Trajectories made by hand, turn after turn with their tokens."""

from dataclasses import dataclass

from turnrl import Reading, Sample, Trajectory, Turn


@dataclass(frozen=True, kw_only=True)
class SampledTurn(Turn):
    """A turn with the tokens that it adds to a sample."""

    ids: tuple[int, ...] = ()
    logprobs: tuple[float, ...] = ()
    observed: tuple[int, ...] = ()
    version: int = 0


def sampled_turn(text, ids, logprobs, reading=None, results=(), observed=(), cut=False, version=0):
    """A turn that sampled the tokens `ids`, after which the policy read `observed`."""
    return SampledTurn(
        text=text,
        reading=reading or Reading(),
        results=tuple(results),
        cut=cut,
        ids=tuple(ids),
        logprobs=tuple(logprobs),
        observed=tuple(observed),
        version=version,
    )


def trajectory(question, prompt, turns, ended_by, begins=0, **more):
    """A trajectory of one sample."""
    sample = Sample().read(prompt)
    for k, turn in enumerate(turns):
        sample = sample.wrote(k, turn.ids, turn.logprobs, turn.version).read(turn.observed)
    return Trajectory(question, tuple(turns), ended_by, (sample,), begins, **more)


def with_turns(whole, turns, ended_by="turns", question=None):
    """Another trajectory with the same prompt and other turns."""
    return trajectory(question or whole.question, whole.samples[0].prompt_ids, turns, ended_by)


def ids_of(whole, k):
    """The tokens of a turn."""
    return tuple(
        token
        for sample in whole.samples
        for token, turn in zip(sample.token_ids, sample.turn_index, strict=True)
        if turn == k
    )


def again(whole, k, **other):
    """A turn of a trajectory of one sample once more, with other settings."""
    turn, sample = whole.turns[k], whole.sample
    logprobs = (
        p for p, n in zip(sample.sampler_logprobs, sample.turn_index, strict=True) if n == k
    )
    as_before = {"reading": turn.reading, "results": turn.results, "observed": observed(whole, k)}
    return sampled_turn(
        turn.text, ids_of(whole, k), logprobs, **(as_before | {"cut": turn.cut} | other)
    )


def observed(whole, k):
    """The tokens that the policy read right after a turn: results and chat markup."""
    (sample,) = (history for history in whole.samples if k in history.turn_index)
    after = len(sample) - sample.turn_index[::-1].index(k)
    later = (n for n in range(after, len(sample)) if sample.turn_index[n] >= 0)
    return sample.token_ids[after : next(later, None)]
