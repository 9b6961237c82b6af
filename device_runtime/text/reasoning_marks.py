"""How families of models write reasoning: the marks around it, by the chat template."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ThinkForm:
    """How a family writes reasoning."""

    opening: str
    closing: str
    wraps: tuple[tuple[str, str], ...] = ()  # what may stand around the answer behind it

    @property
    def shown(self) -> tuple[str, str]:
        """Special tokens that must be seen in the text."""
        return self.opening, self.closing


_FORMS = (
    ThinkForm(
        "<|START_THINKING|>", "<|END_THINKING|>", (("<|START_RESPONSE|>", "<|END_RESPONSE|>"),)
    ),
    ThinkForm("[THINK]", "[/THINK]"),
    ThinkForm("<think>", "</think>", (("<answer>", "</answer>"), ("<response>", "</response>"))),
)
# Of gpt-oss, whose messages stand in channels.
CHANNEL, MESSAGE = "<|channel|>", "<|message|>"
MESSAGE_ENDS = ("<|end|>", "<|return|>", "<|call|>", "<|start|>", CHANNEL)
CHANNEL_MARKS = (*MESSAGE_ENDS, MESSAGE, "<|constrain|>")


def find(template: str) -> ThinkForm | None:
    """The form of a model's chat template; None if it knows no reasoning."""
    for form in _FORMS:
        if form.opening in template or form.closing in template:
            wraps = tuple(wrap for wrap in form.wraps if wrap[0] in template)
            return ThinkForm(form.opening, form.closing, wraps)
    return None


def has_channels(template: str) -> bool:
    """Whether a model writes messages in channels, one of which is for reasoning."""
    return CHANNEL in template and MESSAGE in template


def think_tags(template: str) -> tuple[str, str] | None:
    """What stands before and after the reasoning at the beginning of an answer."""
    form = None if has_channels(template) else find(template)
    return None if form is None else form.shown


def marks_of(template: str) -> tuple[str, ...]:
    """Texts by which reasoning is told from an answer, special tokens or not."""
    return CHANNEL_MARKS if has_channels(template) else think_tags(template) or ()
