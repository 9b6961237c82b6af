"""Generation with the public interface of each library, each in its own process.

`python output_process.py NAME PATH THREADS` reads lines of JSON, `[text, its token ids, maximum
tokens]`. It writes `[milliseconds, token ids]` for each: greedy, batch 1, prefill included.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable

import numpy as np

Answer = Callable[[str, list[int], int], list[int]]
_EOS = 2  # of SmolLM2
_CAPACITY = 2048


def edgellm(path: str, threads: int, *, speculates: bool) -> Answer:
    """Return edgellm's generator; `speculates`: as `llm_inference --spec auto`."""
    from edgellm.device_runtime.api.generation_request import GenerationRequest
    from edgellm.device_runtime.api.llm import LLM
    from edgellm.device_runtime.sampling.params import SamplingParams
    from edgellm.device_runtime.speculate.options import SpecOptions

    llm = LLM(path, spec=SpecOptions(network="auto") if speculates else None)
    assert llm.manifest.options["threads"] == threads
    greedy = SamplingParams(temperature=0.0)

    def answer(text: str, _: list[int], tokens: int) -> list[int]:
        found = llm.generate_text(
            GenerationRequest(
                text=text,
                add_special_tokens=False,
                sampling=greedy,
                max_generate_length=tokens,
                stop=(),
            )
        )
        for _step in found:
            pass
        return found.token_ids

    return answer


def llama_cpp(path: str, threads: int, *, lookup: int) -> Answer:
    """Return llama.cpp's generator; `lookup`: maximum tokens of its prompt lookup; 0: none."""
    from llama_cpp import Llama
    from llama_cpp.llama_speculative import LlamaPromptLookupDecoding

    draft = LlamaPromptLookupDecoding(num_pred_tokens=lookup) if lookup else None
    llama = Llama(
        path, n_ctx=_CAPACITY, n_batch=512, n_threads=threads, n_threads_batch=threads,
        draft_model=draft, verbose=False,
    )  # fmt: skip

    def answer(_: str, ids: list[int], tokens: int) -> list[int]:
        llama.reset()
        found: list[int] = []
        for token in llama.generate(ids, temp=0.0, repeat_penalty=1.0):
            found.append(token)
            if token == _EOS or len(found) == tokens:
                break
        return found

    return answer


def genai(path: str, threads: int) -> Answer:
    """Return onnxruntime-genai's generator, which has no speculation on the CPU."""
    import onnxruntime_genai as og

    config = og.Config(path)
    threads_of = {"session_options": {"intra_op_num_threads": threads}}
    config.overlay(json.dumps({"model": {"decoder": threads_of}}))
    model = og.Model(config)

    def answer(_: str, ids: list[int], tokens: int) -> list[int]:
        params = og.GeneratorParams(model)
        params.set_search_options(max_length=len(ids) + tokens, do_sample=False)
        generator = og.Generator(model, params)
        generator.append_tokens(np.array(ids, np.int32))
        while not generator.is_done():
            generator.generate_next_token()
        return [int(token) for token in generator.get_sequence(0)[len(ids) :]]

    return answer


def transformers(path: str, threads: int) -> Answer:
    """Return transformers' generator in float32."""
    import torch
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(threads)
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()

    def answer(_: str, ids: list[int], tokens: int) -> list[int]:
        rows = torch.tensor([ids])
        found = model.generate(
            rows,
            attention_mask=torch.ones_like(rows),
            do_sample=False,
            max_new_tokens=tokens,
            pad_token_id=_EOS,
        )
        return found[0, len(ids) :].tolist()

    return answer


def openvino(path: str, threads: int, *, lookup: int) -> Answer:
    """Return OpenVINO GenAI's generator for a .gguf file or its own folder."""
    import openvino
    import openvino_genai

    settings = {"INFERENCE_NUM_THREADS": threads}
    if lookup:
        settings["prompt_lookup"] = True
    pipeline = openvino_genai.LLMPipeline(path, "CPU", **settings)
    config = openvino_genai.GenerationConfig()
    config.do_sample, config.eos_token_id, config.apply_chat_template = False, _EOS, False
    if lookup:
        config.num_assistant_tokens, config.max_ngram_size = lookup, 3

    def answer(_: str, ids: list[int], tokens: int) -> list[int]:
        config.max_new_tokens = tokens
        rows = openvino.Tensor(np.array([ids], np.int64))
        mask = openvino.Tensor(np.ones((1, len(ids)), np.int64))
        result = pipeline.generate(openvino_genai.TokenizedInputs(rows, mask), config)
        return list(result.tokens[0])

    return answer


ANSWERERS: dict[str, Callable[[str, int], Answer]] = {
    "edgellm": lambda path, threads: edgellm(path, threads, speculates=False),
    "edgellm, --spec auto": lambda path, threads: edgellm(path, threads, speculates=True),
    "llama.cpp": lambda path, threads: llama_cpp(path, threads, lookup=0),
    "llama.cpp, prompt lookup": lambda path, threads: llama_cpp(path, threads, lookup=2),
    "onnxruntime-genai": genai,
    "transformers": transformers,
    "OpenVINO GenAI": lambda path, threads: openvino(path, threads, lookup=0),
    "OpenVINO GenAI, prompt lookup": lambda path, threads: openvino(path, threads, lookup=4),
}


def main() -> None:
    name, path, threads = sys.argv[1:]
    answer = ANSWERERS[name](path, int(threads))
    print("[]", flush=True)
    for line in sys.stdin:
        text, ids, tokens = json.loads(line)
        start = time.perf_counter()
        found = answer(text, ids, tokens)
        ms = (time.perf_counter() - start) * 1e3
        print(json.dumps([ms, found]), flush=True)


if __name__ == "__main__":
    main()
