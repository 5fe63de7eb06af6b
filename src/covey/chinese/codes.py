"""Title and reason of every code in Chinese, as codes.txt holds them."""

from __future__ import annotations

from pathlib import Path

from covey.chinese.entries import entries

_FILE = Path(__file__).parent / "codes.txt"


def titles_and_whys() -> dict[str, tuple[str, str]]:
    """Return (title, why) by code."""
    return {code: (title, why) for code, title, why in entries(_FILE, 3)}


PAGE_HEAD = """\
# 代码表

covey 的每条消息都带有一个代码。`covey explain CODE --lang zh` 打印同样的内容。
E：配置或输入有误，什么都没有启动（退出码 2）。
W：训练照常进行。F：训练对自身的发现；如果保护机制让训练停下，退出码是 3。

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

是中文的：命令被拒绝时的全部问题和警告（现象、为何重要、可能原因、办法），训练停下时的最后一条说明，以及
`covey explain`。下表中的每个代码都有中文；[tests/faults](../tests/faults/messages) 里固定下来的每一条出错信息
都逐句有中文，由测试保证。没有译文的句子会以英文显示，不会丢失：主要是其他软件给出的原话，如 Python 的异常。

仍是英文的：`covey plan`、`covey doctor`、`covey selftest` 的报告，训练过程在终端上打印的内容
（批大小、进度，以及夹在其中的警告和发现）、`--help`、
Python 接口抛出的异常，以及写进文件的内容。
"""
PAGE_COLUMNS = "| 代码 | 名称 | 为何重要 |"
PAGE_SECTIONS = {
    "E1": "选项与取值",
    "E2": "批与内存",
    "E3": "模型、数据与奖励",
    "E4": "输出与继续训练",
    "W1": "警告",
    "F1": "训练中的发现",
    "F2": "训练出问题的迹象",
    "F3": "训练卡住",
}
