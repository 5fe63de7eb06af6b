"""A reward model in its worker: a sequence classifier whose one logit is the reward of a conversation.

A conversation is written as TRL writes it: messages by the model's own chat template, text as it is, and in
either case no special tokens around it.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from typing import Any, Protocol

from covey.errors import CoveyError
from covey.rewards.callee import RowFault
from covey.texts import tr

Conversation = str | list[dict[str, Any]]


class RunOptions(Protocol):
    """Where the model is, and what one forward pass holds at most."""

    directory: str
    rows: int
    tokens: int


class UnusableModel(CoveyError):
    """A model whose logit is no reward."""


class RewardModel:
    """Loads the model when it is made: float32 on a CPU, the dtype of its files on the GPU of this rank."""

    def __init__(self, args: RunOptions) -> None:
        import torch
        import transformers

        transformers.utils.logging.disable_progress_bar()
        rank = int(os.environ.get("LOCAL_RANK", "0"))
        self._device = torch.device("cuda", rank) if torch.cuda.is_available() else torch.device("cpu")
        self._rows, self._tokens = args.rows, args.tokens
        self._tokenizer = transformers.AutoTokenizer.from_pretrained(args.directory, local_files_only=True)
        model, report = transformers.AutoModelForSequenceClassification.from_pretrained(
            args.directory,
            local_files_only=True,
            use_safetensors=True,
            dtype="auto" if self._device.type == "cuda" else torch.float32,
            output_loading_info=True,
        )
        if report["missing_keys"]:
            names = ", ".join(sorted(report["missing_keys"])[:3])
            raise UnusableModel(
                tr(
                    "{directory} has no weights for {names}: the model was not trained to give scores",
                    directory=args.directory,
                    names=names,
                )
            )
        if model.config.num_labels != 1:
            raise UnusableModel(
                tr(
                    "{directory} has {num_labels} labels, but a reward model must have one",
                    directory=args.directory,
                    num_labels=model.config.num_labels,
                )
            )
        self._model = model.to(self._device).eval()
        self._context = getattr(model.config, "max_position_embeddings", None)

    def __call__(self, *, conversations: Sequence[Conversation]) -> list[float | RowFault]:
        """The reward of each conversation; one that is longer than the model's context has none."""
        rows = [self._ids(c) for c in conversations]
        scores: list[float | RowFault] = [self._fault(ids) for ids in rows]
        whole = [i for i, ids in enumerate(rows) if self._is_whole(ids)]
        for part in self._passes(sorted(whole, key=lambda i: len(rows[i])), rows):
            for i, score in zip(part, self._scores([rows[i] for i in part]), strict=True):
                scores[i] = score
        return scores

    def _ids(self, conversation: Conversation) -> list[int]:
        text: Any = conversation
        if not isinstance(text, str):
            text = self._tokenizer.apply_chat_template(text, tokenize=False)
        return list(self._tokenizer(text, add_special_tokens=False)["input_ids"])

    def _is_whole(self, ids: Sequence[int]) -> bool:
        return 0 < len(ids) <= (self._context or len(ids))

    def _fault(self, ids: Sequence[int]) -> RowFault:
        if not ids:
            return RowFault(tr("prompt and completion together give the reward model no tokens"))
        return RowFault(
            tr(
                "{num_ids} tokens exceed the reward model's context of {context}",
                num_ids=len(ids),
                context=self._context,
            )
        )

    def _passes(self, order: Sequence[int], rows: Sequence[Sequence[int]]) -> Iterator[list[int]]:
        """Rows of about one length together, as many as a pass holds."""
        part: list[int] = []
        for i in order:
            if part and (len(part) == self._rows or (len(part) + 1) * len(rows[i]) > self._tokens):
                yield part
                part = []
            part.append(i)
        if part:
            yield part

    def _scores(self, rows: Sequence[Sequence[int]]) -> list[float]:
        import torch

        # Decoders score the last token that is not padding. Padding is a token that no row has, unless the
        # model names its own: so each row gets what it would get alone.
        own = self._model.config.pad_token_id
        used = {token for ids in rows for token in ids}
        padding = own if own is not None else next(i for i in range(len(used) + 1) if i not in used)
        self._model.config.pad_token_id = padding
        longest = max(len(ids) for ids in rows)
        ids_BT = torch.full((len(rows), longest), padding, device=self._device)
        is_text_BT = torch.zeros_like(ids_BT)
        for row, ids in enumerate(rows):
            ids_BT[row, : len(ids)] = torch.tensor(ids, device=self._device)
            is_text_BT[row, : len(ids)] = 1
        try:
            with torch.inference_mode():
                logits_B1 = self._model(input_ids=ids_BT, attention_mask=is_text_BT).logits
        finally:
            self._model.config.pad_token_id = own
        return [float(value) for value in logits_B1[:, 0].float().tolist()]
