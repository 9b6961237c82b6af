"""Config readers that all visual encoders share."""

from __future__ import annotations

from edgellm.core.errors import UnsupportedModelError
from edgellm.export.config.activations import ACTIVATIONS
from edgellm.export.config.reader import ConfigReader

_TRAINING = ("dropout", "hidden_dropout_prob", "projection_dropout", "initializer_factor")


def skip_training(vision: ConfigReader) -> None:
    """Ignore keys of an encoder's training."""
    for key in _TRAINING:
        vision.optional(key, object)


def read_square(vision: ConfigReader, key: str, default: int) -> int:
    """A side in pixels, which some configs repeat for each axis.

    Raises:
        UnsupportedModelError: not positive, or not square.
    """
    value = vision.read(key, object, default)
    sides = list(value) if isinstance(value, (list, tuple)) else [value]
    if len(set(sides)) != 1 or not isinstance(sides[0], int) or sides[0] < 1:
        raise UnsupportedModelError(f"config.json: {key} = {value!r} is not the side of a square")
    return sides[0]


def read_activation(reader: ConfigReader, key: str, default: str) -> str:
    """One of `ACTIVATIONS`.

    Raises:
        UnsupportedModelError: another one.
    """
    reader.expect(key, *ACTIVATIONS)
    return reader.read(key, str, default)


def read_indices(vision: ConfigReader, key: str, default: tuple[int, ...]) -> tuple[int, ...]:
    """Indices of layers.

    Raises:
        UnsupportedModelError: not a list of integers.
    """
    indices = vision.read(key, list, list(default))
    if not all(isinstance(index, int) and index >= 0 for index in indices):
        raise UnsupportedModelError(f"config.json: {key} = {indices} should be numbers of layers")
    return tuple(indices)


def read_theta(vision: ConfigReader, default: float = 1e4) -> float:
    """The base of a 2-D RoPE, in either of its places; transformers reads `default` as `axial`.

    Raises:
        UnsupportedModelError: another kind of RoPE.
    """
    rope = ConfigReader(vision.read("rope_parameters", dict, {}))
    rope.expect("rope_type", "axial", "default")
    theta = rope.read("rope_theta", float, vision.read("rope_theta", float, default))
    rope.finish()
    return theta


def check_heads(size: int, num_heads: int, *, multiple: int = 1) -> int:
    """The size of a head.

    Raises:
        UnsupportedModelError: heads do not divide the size, or are not a multiple of `multiple`.
    """
    if size % num_heads or (size // num_heads) % multiple:
        raise UnsupportedModelError(
            f"config.json: {num_heads} heads do not divide a width of {size}"
        )
    return size // num_heads


def language_size(model: ConfigReader) -> int:
    """Hidden size of the language model, in `text_config` or, in older files, at the top level."""
    text = model.optional("text_config", dict)
    return (model if text is None else ConfigReader(text)).positive("hidden_size")


def expect_language_size(model: ConfigReader, size: int) -> None:
    """Reject an encoder whose output width differs from the language model's.

    Raises:
        UnsupportedModelError: its hidden size is not `size`.
    """
    if (wanted := language_size(model)) != size:
        raise UnsupportedModelError(
            f"config.json: the visual encoder ends in {size} values, "
            f"the language model takes {wanted}"
        )
