"""Bad inputs: data, models, templates, rewards and gold answers."""

from __future__ import annotations

import json
import struct
from pathlib import Path

from covey.rewards.sandbox.layers import Unisolated
from faults.case import SUMS, Case, changed_model, jsonl, model, sums, void, words

_ROWS = {"rows.jsonl": SUMS}


def _reward(case: str, body: str, *, name: str = "reward", arguments: str = "completions, **kwargs") -> Case:
    """A reward function with this body; without a name, the body is the file."""
    head = f"def {name}({arguments}):\n    " if name else ""
    typed = words("--reward_workers 1", reward="mine.py:reward")
    return Case(name=case, words=typed, files={"mine.py": f"{head}{body}\n"})


def _data(name: str, rows: list[dict[str, object]], rest: str = "", reward: str = "accuracy") -> Case:
    return Case(
        name=name, words=words(rest, dataset="rows.jsonl", reward=reward), files={"rows.jsonl": jsonl(rows)}
    )


def _model(name: str, **config: object) -> Case:
    return Case(name=name, words=words(model="model"), make=changed_model(**config))


def _offline(patch, here) -> None:
    patch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    patch.setattr("huggingface_hub.constants.HF_HUB_CACHE", "hub-cache")


def _nothing_shuts_off(patch, here) -> None:
    def isolate(**_: object) -> None:
        raise Unisolated(("bubblewrap is not installed",))

    patch.setattr("covey.checks.code.look.isolate", isolate)
    patch.setattr("covey.checks.code.look.bubblewrap", lambda: None)


def _no_namespaces(patch, here) -> None:
    """As on Ubuntu 24.04, for users other than root."""

    def isolate(**_: object) -> None:
        raise Unisolated(("bubblewrap 0.9.0: bwrap: setting up uid map: Permission denied",))

    patch.setattr("covey.checks.code.look.isolate", isolate)
    patch.setattr("covey.checks.code.look.bubblewrap", lambda: "/usr/bin/bwrap")


def _shards(here: Path) -> None:
    model(here / "model", without=("model.safetensors",))
    files = {f"model.layers.{n}.weight": f"model-0000{n}-of-00003.safetensors" for n in (1, 2, 3)}
    (here / "model" / "model.safetensors.index.json").write_text(json.dumps({"weight_map": files}))
    (here / "model" / "model-00001-of-00003.safetensors").write_bytes(b"")


def _damaged(here: Path) -> None:
    (model(here / "model") / "model.safetensors").write_bytes(b"\xff" * 64)


def _pickled(here: Path) -> None:
    (model(here / "model", without=("model.safetensors",)) / "pytorch_model.bin").write_bytes(b"\x80\x02")


def _adapter(here: Path) -> None:
    """One that was trained on another machine, as its base says."""
    (here / "adapter").mkdir()
    body = {"peft_type": "LORA", "r": 8, "lora_alpha": 32, "target_modules": ["q_proj"]}
    body["base_model_name_or_path"] = "/data/Qwen2.5-0.5B"
    (here / "adapter" / "adapter_config.json").write_text(json.dumps(body))
    (here / "adapter" / "adapter_model.safetensors").write_bytes(struct.pack("<Q", 2) + b"{}")


def _unopened_template(here: Path) -> None:
    template = model(here / "model") / "chat_template.jinja"
    template.write_text(template.read_text(encoding="utf-8").partition("{%- if add_generation_prompt")[0])


def _two_starts(here: Path) -> None:
    settings = model(here / "model") / "tokenizer_config.json"
    settings.write_text(
        settings.read_text(encoding="utf-8").replace("null", '"<|endoftext|>"'), encoding="utf-8"
    )
    template = here / "model" / "chat_template.jinja"
    template.write_text("{{ bos_token }}{{ bos_token }}" + template.read_text(encoding="utf-8"))


def _broken_template(here: Path) -> None:
    (model(here / "model") / "chat_template.jinja").write_text("{% for m in messages %}{{ m.content }}")


CASES = (
    # -- data
    Case(name="data_file_missing", words=words(dataset="data/train.jsonl")),
    Case(name="data_file_empty", words=words(dataset="rows.jsonl"), files={"rows.jsonl": ""}),
    Case(
        name="data_broken_line",
        words=words(dataset="rows.jsonl"),
        files={"rows.jsonl": SUMS + '{"question": \n'},
    ),
    Case(name="data_format_unknown", words=words(dataset="./rows.txt"), files={"rows.txt": "a\n"}),
    _data("column_missing", [{"text": "What is 1+1?", "gold": "2"}] * 64),
    _data("column_of_the_reward_missing", [{"question": "What is 1+1?", "answer_text": "2"}] * 64),
    _data("columns_rename_a_missing_one", sums(64), '--columns \'{"problm": "question"}\''),
    _data("prompts_empty", [{"question": "  ", "solution": "2"}] * 64),
    _data("prompts_too_long", sums(64), "--max_length 3"),
    _data("prompts_too_long_for_the_model", sums(64, question="one two three four five " * 500)),
    _data("context_too_short", sums(64), "--max_completion_length 2040"),
    _data("context_smaller_than_a_completion", sums(64), "--max_completion_length 4096"),
    _data("images", sums(64, image="a.png")),
    Case(
        name="code_without_isolation",
        words=words(dataset="rows.jsonl", reward="code_reward"),
        files={"rows.jsonl": jsonl(sums(64, test_cases=[{"input": "1", "output": "2"}]))},
        edge=_nothing_shuts_off,
    ),
    Case(
        name="code_without_namespaces",
        words=words(dataset="rows.jsonl", reward="code_reward"),
        files={"rows.jsonl": jsonl(sums(64, test_cases=[{"input": "1", "output": "2"}]))},
        edge=_no_namespaces,
    ),
    Case(
        name="code_without_isolation_or_tests",
        words=words(dataset="rows.jsonl", reward="code_reward"),
        files={"rows.jsonl": jsonl(sums(64, verification_info={"language": "c++", "test_cases": []}))},
        edge=_nothing_shuts_off,
    ),
    _data(
        "golds_that_do_not_parse",
        [{"question": "What is 1+1?", "solution": s} for s in ("", "2", "3", "4") * 16],
    ),
    _data(
        "golds_that_are_absent",
        [{"question": "What is 1+1?", "solution": None if n % 2 else "2"} for n in range(64)],
    ),
    Case(
        name="chinese",
        words=words(dataset="数据/训练集.jsonl"),
        files={
            "数据/训练集.jsonl": jsonl(
                {"题目": f"计算 {n}+1 等于多少？", "答案": str(n + 1)} for n in range(64)
            )
        },
    ),
    Case(name="dataset_split_malformed", words=words(dataset="openai/gsm8k:main@")),
    Case(name="dataset_rows_malformed", words=words(dataset="openai/gsm8k#many")),
    Case(name="dataset_split_of_a_file", words=words(dataset="rows.jsonl@train"), files=_ROWS),
    Case(name="dataset_not_in_the_cache", words=words(dataset="openai/gsm8k:main"), edge=_offline),
    Case(name="val_dataset_missing", words=words("--val_dataset test.jsonl")),
    # -- models
    Case(name="model_missing", words=words(model="./models/qwen")),
    Case(name="model_is_a_file", words=words(model="tiny/config.json"), files={"tiny/config.json": "{}"}),
    Case(name="adapter_is_a_file", words=words("--adapters file"), files={"file": "mine"}),
    Case(name="reward_model_is_a_file", words=words("--reward_model file"), files={"file": "mine"}),
    Case(name="model_not_in_the_cache", words=words(model="Qwen/Qwen2.5-0.5B-Instruct"), edge=_offline),
    Case(
        name="model_without_weights",
        words=words(model="model"),
        make=lambda here: void(model(here / "model", without=("model.safetensors",))),
    ),
    Case(
        name="model_without_a_configuration",
        words=words(model="model"),
        make=lambda here: void(model(here / "model", without=("config.json",))),
    ),
    Case(
        name="model_without_a_tokenizer",
        words=words(model="model"),
        make=lambda here: void(model(here / "model", without=("tokenizer.json",))),
    ),
    Case(name="model_pickled", words=words(model="model"), make=_pickled),
    Case(name="model_shard_missing", words=words(model="model"), make=_shards),
    Case(name="model_damaged", words=words(model="model"), make=_damaged),
    _model("model_architecture_unknown", model_type="qwne2"),
    _model("model_with_code", model_type="my_model", auto_map={"AutoConfig": "configuration.MyConfig"}),
    _model("model_of_images", vision_config={"hidden_size": 8}),
    _model("model_encoder", model_type="bert", architectures=["BertForMaskedLM"]),
    _model(
        "model_encoder_decoder",
        model_type="t5",
        architectures=["T5ForConditionalGeneration"],
        is_encoder_decoder=True,
    ),
    Case(name="model_adapter", words=words(model="adapter"), make=_adapter),
    Case(
        name="remote_code_without_a_commit",
        words=words("--trust_remote_code true", model="Qwen/Qwen2.5-0.5B-Instruct"),
        edge=_offline,
    ),
    Case(name="lora_targets_misspelt", words=words("--tuner_type lora --target_modules q_porj v_proj")),
    _reward("reward_that_reads_messages", "return [-float(len(c[0]['content'])) for c in completions]"),
    _reward("reward_that_reads_messages_and_fails", "return [c[0]['contents'] for c in completions]"),
    Case(
        name="reward_that_reads_text",
        words=words("--reward_workers 1", dataset="rows.jsonl", reward="mine.py:reward"),
        files={
            "mine.py": "def reward(completions, **kwargs):\n    return [-float(len(c.strip())) for c in completions]\n",
            "rows.jsonl": jsonl(
                {"prompt": [{"role": "user", "content": f"What is {n}+1?"}]} for n in range(64)
            ),
        },
    ),
    Case(
        name="lora_modules_to_save_that_are_one_tensor",
        words=words("--tuner_type lora --modules_to_save embed_tokens lm_head"),
    ),
    Case(
        name="lora_one_of_two_modules_to_save",
        words=words("--tuner_type lora --modules_to_save embed_tokens nrm lm_head"),
    ),
    Case(name="lora_target_that_is_the_head", words=words("--tuner_type lora --target_modules lm_head")),
    Case(name="lora_modules_to_save_misspelt", words=words("--tuner_type lora --modules_to_save lm_haed")),
    Case(
        name="template_missing",
        words=words(model="model"),
        make=lambda here: void(model(here / "model", without=("chat_template.jinja",))),
    ),
    Case(name="template_broken", words=words(model="model"), make=_broken_template),
    Case(
        name="template_that_takes_all_memory",
        words=words("--chat_template mine.jinja"),
        files={"mine.jinja": "{{ messages[0].content * 3000000000 }}"},
    ),
    Case(
        name="template_that_fails",
        words=words("--chat_template mine.jinja"),
        files={"mine.jinja": "{{ 1 / 0 }}{{ messages }}"},
    ),
    Case(name="template_that_opens_no_answer", words=words(model="model"), make=_unopened_template),
    Case(name="template_with_two_start_tokens", words=words(model="model"), make=_two_starts),
    Case(name="template_file_missing", words=words("--chat_template mine.jinja")),
    # -- rewards
    Case(name="reward_misspelt", words=words(reward="acuracy format")),
    Case(name="reward_misspelt_of_ms_swift", words=words(reward="soft_overlog")),
    Case(name="reward_unknown", words=words(reward="bleurt")),
    Case(
        name="overlong_lengths_swapped",
        words=words("--soft_max_length 3 --soft_cache_length 16", reward="soft_overlong"),
    ),
    Case(
        name="overlong_never_reached",
        words=words("--soft_max_length 1280 --soft_cache_length 256", reward="get_soft_overlong_punishment"),
    ),
    _data("toolbench_without_a_gold", [{"question": "?", "final": "Action: a"}] * 64, reward="toolbench"),
    Case(name="reward_file_without_a_name", words=words(reward="mine.py"), files={"mine.py": ""}),
    Case(name="reward_file_missing", words=words("--reward_workers 1", reward="rewards/mine.py:reward")),
    _reward("reward_name_missing", "return [0.0] * len(completions)", name="rewards"),
    _reward("reward_syntax_error", "return [0.0] * len(completions", arguments="completions, **kwargs"),
    _reward("reward_import_missing", "import nowhere_to_be_found", name=""),
    _reward("reward_signature", "return [0.0] * len(completions)", arguments="completions, ground_truth"),
    _reward("reward_signature_unlike_any", "return [0.0] * len(texts)", arguments="texts, limits"),
    _reward("reward_too_few", "return [1.0]"),
    _reward("reward_too_many", "return [1.0] * 5"),
    _reward("reward_raises", "return [float(c.split('=')[1]) for c in completions]"),
    _reward("reward_raises_on_one_row", "return [float(c[0] == '1') for c in completions]"),
    _reward("reward_gives_strings", "return ['good' for _ in completions]"),
    _reward("reward_gives_nan", "return [float('nan') for _ in completions]"),
    _reward("reward_gives_one_number", "return 1.0"),
    Case(
        name="plugin_syntax_error",
        words=words("--external_plugins plugin.py --reward_workers 1", reward="mine"),
        files={"plugin.py": "orms['mine'] = \n"},
    ),
    Case(
        name="plugin_import_missing",
        words=words("--external_plugins plugin.py --reward_workers 1", reward="mine"),
        files={"plugin.py": "import nowhere_to_be_found\n"},
    ),
    Case(
        name="plugin_missing", words=words("--external_plugins plugin.py --reward_workers 1", reward="mine")
    ),
    Case(name="reward_twice", words=words(reward="accuracy accuracy")),
    Case(name="weights_too_few", words=words("--reward_weights 1 --system r1", reward="accuracy format")),
    Case(name="weights_too_many", words=words("--reward_weights 1 0.5 2")),
    Case(name="weights_all_zero", words=words("--reward_weights 0 0 --system r1", reward="accuracy format")),
)
