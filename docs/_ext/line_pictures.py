"""The picture of a line that is being spread, drawn from the arithmetic that decides it."""

from __future__ import annotations

from html import escape

from celery_native_delay.rates.line import Line
from celery_native_delay.rates.rate import Rate

#: Pixels: of a second, of a row, and where the first second is.
SECOND, ROW, LEFT, TOP = 110, 17, 60, 34

#: What happens in it: so many come at once, are held at a time for so long, and one comes last.
COMING, HELD_AT, HELD_FOR, LAST_AT = 12, 1.6, 2.0, 2.5

_US = 1_000_000


def spread(rate: Rate) -> tuple[list[tuple[float, float]], float, float]:
    """When each task came and when it starts, in seconds; and a hold, from when to when."""
    line, start_us = Line(), 1_795_176_000_000_000
    waiting: list[tuple[int, int, int | None]] = [
        (start_us, number, None) for number in range(COMING)
    ]
    waiting.append((start_us + round(LAST_AT * _US), COMING, None))
    came = {number: (at_us - start_us) / _US for at_us, number, _ in waiting}
    starts: dict[int, float] = {}
    held = False
    while waiting:
        waiting.sort()
        now_us, number, place = waiting.pop(0)
        if not held and now_us >= start_us + HELD_AT * _US:
            held = True
            held_us = start_us + round(HELD_AT * _US)
            line, front = line.hold(rate, held_us, round(HELD_FOR * _US))
            came[COMING + 1] = HELD_AT  # the task that was turned away
            waiting.append((held_us + round(HELD_FOR * _US), COMING + 1, front))
        line, turn = line.ask(rate, now_us, place)
        if turn.starts:
            starts[number] = (now_us - start_us) / _US
        else:
            waiting.append((now_us + turn.wait_us, number, turn.place))
    return (
        [(came[n], starts[n]) for n in sorted(came, key=starts.__getitem__)],
        HELD_AT,
        HELD_AT + HELD_FOR,
    )


def line_svg(rate: Rate) -> str:
    """Each task a row: where it waits in the broker, and where it starts."""
    tasks, held_from, held_until = spread(rate)
    width = LEFT + SECOND * (max(at for _, at in tasks) + 0.6)
    bottom = TOP + ROW * len(tasks)
    label = f"{len(tasks)} tasks of one key, spread at {rate.limit} with a burst of {rate.burst}"
    box = (
        f'<rect class="held" x="{_x(held_from):g}" y="{TOP - 14}" '
        f'width="{SECOND * (held_until - held_from):g}" height="{bottom - TOP + 14}"/>'
    )
    parts = [
        box,
        _text(_x((held_from + held_until) / 2), TOP - 19, f"RetryAfter({HELD_FOR:g})", "key"),
    ]
    for second in range(int((width - LEFT) / SECOND) + 1):
        parts.append(f'<path class="second" d="M{_x(second):g} {TOP - 8}V{bottom}"/>')
        parts.append(_text(_x(second), bottom + 16, f"{second} s", "small"))
    for row, (came, starts) in enumerate(tasks):
        y = TOP + ROW * row
        if starts > came:
            parts.append(f'<path class="waits" d="M{_x(came):g} {y}H{_x(starts):g}"/>')
        parts.append(f'<circle class="starts" cx="{_x(starts):g}" cy="{y}" r="5"/>')
    return (
        f'<svg viewBox="0 0 {width:g} {bottom + 26:g}" role="img" aria-label="{escape(label)}">'
        f"<title>{escape(label)}</title>{''.join(parts)}</svg>"
    )


def _x(seconds: float) -> float:
    return LEFT + SECOND * seconds


def _text(x: float, y: float, text: str, kind: str) -> str:
    return f'<text class="{kind}" x="{x:g}" y="{y:g}" text-anchor="middle">{escape(text)}</text>'
