"""What was measured, as JSON and as a Markdown table."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Result:
    """One line of the report.

    Attributes:
        section: "correct", "lora", "attention" or "step".
        case: what ran; implementation: by what.
        microseconds: device time of one layer, or of one step.
        floor: microseconds that its bytes take at the measured copy bandwidth.
        error: largest absolute difference to the oracle; limit: the most that counts as right.
        note: why there is no number.
    """

    section: str
    case: str
    implementation: str
    microseconds: float | None = None
    floor: float | None = None
    error: float | None = None
    limit: float | None = None
    note: str = ""

    @classmethod
    def failed(cls, section: str, case: str, implementation: str, error: Exception, **known: Any) -> Result:
        """What raised: it is not implemented, or else wrong. The rest of the report goes on."""
        lines = str(error).strip().splitlines() or [""]
        if isinstance(error, NotImplementedError):
            return cls(section, case, implementation, note=f"not implemented: {lines[0][:200]}", **known)
        note = f"{type(error).__name__}: {lines[0][:200]}"
        return cls(section, case, implementation, error=float("nan"), limit=0.0, note=note, **known)

    @property
    def right(self) -> bool:
        """False if an error is larger than its limit (a NaN is)."""
        return self.error is None or self.limit is None or self.error <= self.limit

    @property
    def share(self) -> float | None:
        """Floor over time: 1 is at the floor."""
        if not self.microseconds or self.floor is None:
            return None
        return self.floor / self.microseconds


def markdown(results: Sequence[Result], head: dict[str, Any]) -> str:
    """The report as text."""
    lines = [f"{name}: {value}  " for name, value in head.items()]
    checks = [result for result in results if result.section == "correct"]
    if checks:
        lines += ["", "| right | implementation | case | error | limit |", "|---|---|---|---|---|"]
        for r in checks:
            right = "not checked" if r.error is None else "yes" if r.right else "**NO**"
            case = f"{r.case}: {r.note}" if r.note else r.case
            lines.append(f"| {right} | {r.implementation} | {case} | {_number(r.error)} | {_number(r.limit)} |")
    for section in dict.fromkeys(r.section for r in results if r.section != "correct"):
        lines += ["", f"| {section} | implementation | us | floor us | floor / time |", "|---|---|---|---|---|"]
        for r in results:
            if r.section == section:
                numbers = [_number(r.microseconds), _number(r.floor), _number(r.share)]
                lines.append(f"| {r.case} | {r.implementation} | {r.note or ' | '.join(numbers)} |")
    return "\n".join(lines) + "\n"


def write(path: Path, results: Sequence[Result], head: dict[str, Any]) -> None:
    """JSON: {..head, "results": [...]}."""
    rows = [{**asdict(r), "share": r.share, "right": r.right} for r in results]
    path.write_text(json.dumps({**head, "results": rows}, indent=1) + "\n", encoding="utf-8")


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.3g}"
