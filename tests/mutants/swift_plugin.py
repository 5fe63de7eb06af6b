"""A scheduler of the planted faults: it asks again, and leaves out the first token of the first turn."""

from swift.rollout.multi_turn import MultiTurnScheduler, multi_turns


class Masked(MultiTurnScheduler):
    def check_finished(self, infer_request, response_choice, current_turn):
        return current_turn == 2

    def step(self, infer_request, response_choice, current_turn):
        ids = list(response_choice.token_ids)
        infer_request.messages.append({"role": "user", "content": infer_request.messages[0]["content"]})
        return {
            "infer_request": infer_request,
            "response_token_ids": ids,
            "response_loss_mask": [0] + [1] * (len(ids) - 1),
        }


multi_turns["masked"] = Masked
