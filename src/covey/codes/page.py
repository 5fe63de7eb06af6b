"""The pages of codes, in English and in Chinese."""

from __future__ import annotations

from collections.abc import Mapping

from covey.codes import CODES, Code, chinese_codes

_SECTIONS = {
    "E1": "Options and values",
    "E2": "Batch and memory",
    "E3": "Model, data and rewards",
    "E4": "Output and resume",
    "W1": "Warnings",
    "F1": "Findings of a run",
    "F2": "Signs that a run goes wrong",
    "F3": "Hangs",
}


_HEAD = """\
# Codes

Every message of covey carries a code. `covey explain CODE` prints it, with the pages that speak of it.
E: the configuration or the input is at fault, and nothing was started (exit code 2).
W: the run goes on. F: what a run finds out about itself; a guard that stops it exits with 3.
"""
_COLUMNS = "| code | title | why |"

_CHINESE_HEAD = """\
# 代码表

covey 的每条消息都带有一个代码。`covey explain CODE --lang zh` 打印同样的内容，以及讲到它的文档。
E：配置或输入有误，什么都没有启动（退出码 2）。
W：训练照常进行。F：训练过程中发现的问题；如果每步检查因此终止训练，退出码是 3。

## 用中文显示消息

任何子命令都可以加上 `--lang zh`，放在哪里都行；不写时，如果环境变量 `LC_ALL`、`LC_MESSAGES`、`LANG`
中第一个有值的以 `zh` 开头（例如 `LANG=zh_CN.UTF-8`），也用中文。`--lang en` 改回英文。

```console
$ covey train --model quickstart --dataset quickstart --reward_funcs accuracy --num_generations 7 --lang zh
E202 num_generations：一次 rollout 装不下整数个组
  现象      1 个进程 x per_device_train_batch_size 8 x steps_per_generation 8 = 每次 rollout 64 条回
            答，不是 num_generations 7 的整数倍。
...
$ echo $?
2
$ covey explain E201 --lang zh
E201 每组少于两条回答
...
```

用中文显示的有：命令被拒绝时的全部问题和警告（现象、说明、可能原因、办法），训练停下时的最后一条说明，
`covey plan`、`covey doctor`、`covey selftest` 的报告，训练过程在终端上打印的内容，`--help`，
以及 `covey explain`。

仍用英文的有：其他软件给出的原话（如 Python 的异常），指标名，Python 接口抛出的异常，
以及写进文件和 `--json` 的内容。
"""
_CHINESE_COLUMNS = "| 代码 | 名称 | 说明 |"
_CHINESE_SECTIONS = {
    "E1": "选项与取值",
    "E2": "批与内存",
    "E3": "模型、数据与奖励",
    "E4": "输出与继续训练",
    "W1": "警告",
    "F1": "训练中的发现",
    "F2": "训练出问题的迹象",
    "F3": "训练卡住",
}


def markdown() -> str:
    """Return docs/codes.md."""
    return page(CODES, _HEAD, _SECTIONS, _COLUMNS)


def markdown_chinese() -> str:
    """Return docs/codes.zh.md."""
    sections = {prefix: _CHINESE_SECTIONS.get(prefix, heading) for prefix, heading in _SECTIONS.items()}
    return page(chinese_codes(), _CHINESE_HEAD, sections, _CHINESE_COLUMNS)


def page(codes: Mapping[str, Code], head: str, sections: Mapping[str, str], columns: str) -> str:
    """Return a page with a table of codes under each heading."""
    lines = [head.rstrip()]
    for prefix, heading in sections.items():
        lines += ["", f"## {heading}", "", columns, "|---|---|---|"]
        lines += [f"| {c.code} | {c.title} | {c.why} |" for c in codes.values() if c.code.startswith(prefix)]
    return "\n".join(lines) + "\n"
