"""Reasoning marks of model families, found by the chat template."""

from __future__ import annotations

from dataclasses import dataclass, replace


@dataclass(frozen=True, slots=True, kw_only=True)
class ThinkForm:
    """Marks of a family."""

    opening: str
    closing: str
    wraps: tuple[tuple[str, str], ...] = ()  # tags that may enclose the output after the reasoning
    label: str = ""  # end of `opening` that is text after a special token

    @property
    def shown(self) -> tuple[str, str]:
        """Special tokens that must be part of the output text."""
        return self.opening.removesuffix(self.label), self.closing


_FORMS = (
    ThinkForm(
        opening="<|START_THINKING|>",
        closing="<|END_THINKING|>",
        wraps=(("<|START_RESPONSE|>", "<|END_RESPONSE|>"),),
    ),
    ThinkForm(opening="[THINK]", closing="[/THINK]"),
    ThinkForm(opening="<|channel>thought", closing="<channel|>", label="thought"),  # Gemma 4
    ThinkForm(
        opening="<think>",
        closing="</think>",
        wraps=(("<answer>", "</answer>"), ("<response>", "</response>")),
    ),
)
# Of gpt-oss, whose messages have channels.
CHANNEL, MESSAGE, START, END = "<|channel|>", "<|message|>", "<|start|>", "<|end|>"
MESSAGE_ENDS = (END, "<|return|>", "<|call|>", START, CHANNEL)
CHANNEL_MARKS = (*MESSAGE_ENDS, MESSAGE, "<|constrain|>")


def find(template: str) -> ThinkForm | None:
    """The marks of a model's chat template; None without reasoning."""
    for form in _FORMS:
        if form.opening in template or form.closing in template:
            wraps = tuple(wrap for wrap in form.wraps if wrap[0] in template)
            return replace(form, wraps=wraps)
    return None


def opened(form: ThinkForm, prompt: str, *, continues: bool) -> bool | None:
    """Whether a prompt opens the reasoning; None: the output has none.

    Args:
        form: marks of the model.
        prompt: formatted messages, up to the output.
        continues: whether the output continues the text of a message.
    """
    begun = prompt.rfind(form.opening) > prompt.rfind(form.closing)
    if continues:
        return begun or None
    end = prompt.rstrip()
    if end.endswith(form.opening):
        return True
    return None if end.endswith(form.closing) else False


def has_channels(template: str) -> bool:
    """Whether a model writes messages in channels, one for reasoning."""
    return CHANNEL in template and MESSAGE in template


def begins_message(prompt: str) -> bool:
    """Whether an output after a prompt begins with a channel."""
    return prompt.endswith(f"{START}assistant")


def think_tags(template: str) -> tuple[str, str] | None:
    """The marks before and after the reasoning at the beginning of an output."""
    form = None if has_channels(template) else find(template)
    return None if form is None else form.shown


def marks_of(template: str) -> tuple[str, ...]:
    """All texts that separate reasoning from output, special tokens or not."""
    return CHANNEL_MARKS if has_channels(template) else think_tags(template) or ()
