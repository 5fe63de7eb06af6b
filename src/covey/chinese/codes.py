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

在任何命令中加上 `--lang zh`，或者环境变量 `LC_ALL`、`LC_MESSAGES`、`LANG` 中第一个有值的以 `zh` 开头，
出错信息就用中文；`--lang en` 用英文。没有中文译文的句子保留英文。`covey plan` 和训练过程在终端上打印的内容
（批大小、进度，以及其中的警告）、`--help` 和文件里的内容目前仍是英文。
"""
PAGE_COLUMNS = "| 代码 | 名称 | 为何重要 |"
PAGE_SECTIONS = {
    "E1": "选项与取值",
    "E2": "批与内存",
    "E3": "模型、数据与奖励",
    "E4": "输出与继续训练",
    "W1": "警告",
    "F1": "训练中的发现",
}
