"""The texts of the draft's second training: `python make_texts.py answers.jsonl texts.jsonl`.

Questions and the base's answers, from conversations.tar.xz: some alone, and some joined to chats of
a given number of tokens. The draft learns the base's probabilities at every token after the first
question of a text, so a joined chat trains it in long contexts.
"""

from __future__ import annotations

import argparse
import json
import random
from pathlib import Path

from tokenizers import Tokenizer

from edgellm.export.pipeline.open_checkpoint import open_checkpoint
from edgellm.scripts import smollm2

END, USER, ASSISTANT = "<|im_end|>", "<|im_start|>user\n", "<|im_start|>assistant\n"


def main() -> None:
    """Write one {"messages": [...]} a line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("answers", type=Path)
    parser.add_argument("output", type=Path)
    parser.add_argument("--alone", type=int, default=400, help="texts of one answer")
    parser.add_argument(
        "--joined", type=int, nargs="*", default=[2048] * 30 + [4096] * 4 + [8192], help="tokens"
    )
    given = parser.parse_args()
    tokenizer = Tokenizer.from_str(
        open_checkpoint(str(smollm2.fetch())).tokenizer_files["tokenizer.json"].decode()
    )
    lines = given.answers.read_bytes().splitlines()
    random.Random(1).shuffle(lines)
    talks = (_talk(tokenizer, line) for line in lines)
    with given.output.open("w", encoding="utf-8") as stream:
        for tokens in [0] * given.alone + given.joined:
            question, answer, count = next(talks)
            while count < tokens:
                asked, said, more = next(talks)
                answer += f"{END}\n{USER}{asked}{END}\n{ASSISTANT}{said}"
                count += more
            messages = [("user", question), ("assistant", answer)]
            turns = [{"role": role, "content": content} for role, content in messages]
            stream.write(json.dumps({"messages": turns}) + "\n")


def _talk(tokenizer: Tokenizer, line: bytes) -> tuple[str, str, int]:
    """Question, answer, and the number of tokens of both, of a stored answer."""
    stored = json.loads(line)
    prompt, answer = (
        tokenizer.decode(stored[part], skip_special_tokens=False) for part in ("prompt", "answer")
    )
    asked = prompt.rpartition(USER)[2].removesuffix(f"{END}\n{ASSISTANT}")
    return asked, answer.removesuffix(END), len(stored["prompt"]) + len(stored["answer"])


if __name__ == "__main__":
    main()
