"""Addresses in a report. Appended to the name of the page, they open it at one place."""

from __future__ import annotations

from urllib.parse import quote

from turnrl.run import record


def link(run: int, row: record.Row, attempt: bool = True) -> str:
    """The address of a trajectory or of its group, as the page writes it: `#/t/0/val/48/2/0`.

    Args:
        run: Number of the run among those of the report, from 0.
        row: The trajectory, with `split`, `policy_version`, `group` and `member`.
        attempt: True for the trajectory; False for all attempts at its question.
    """
    place = ("split", "policy_version", "group", *(("member",) if attempt else ()))
    parts = [run, *(row[name] for name in place)]
    # the page's script has encodeURIComponent, which leaves these as they are
    quoted = "/".join(quote(str(part), safe="!~*'()") for part in parts)
    return f"#/{'t' if attempt else 'g'}/{quoted}"
