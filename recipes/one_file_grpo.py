"""GRPO in one file, read from top to bottom: no classes, no framework, nothing hidden.

    python recipes/one_file_grpo.py                         # the built-in model learns two-digit addition
    python recipes/one_file_grpo.py --model DIR --data FILE.jsonl --output log.jsonl

The idea: sample several completions of one prompt, score them, and make those that beat the average of their
own group more likely and the others less likely. That average does the work of PPO's value network.

A row of the data holds chat `messages` and a `solution`. The package covey does the same, and a test holds
the two to the same tokens, losses and weights, step for step.

The last letters of a tensor's name are its axes, so `reward_PG[p, g]` is sibling g of prompt p:

    P  prompts of a rollout                  L  tokens of a prompt, padded on the left
    G  siblings: completions of one prompt   C  tokens of a completion, padded on the right
    B  = P x G, rows of a rollout            T  = L + C, a whole row
    M  rows of one forward pass              V  vocabulary
"""

import argparse
import copy
import hashlib
import importlib.util
import json
import os
import re
from pathlib import Path

import numpy as np
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache


# ---- 1. Data: which prompts come when ----
def read_rows(path):
    if path is not None:
        lines = Path(path).read_text(encoding="utf-8").split("\n")
        return [json.loads(line) for line in lines if line.strip()]
    ask = "What is {}+{}?".format
    pairs = [(a, b) for a in range(100) for b in range(100)]
    return [{"messages": [{"role": "user", "content": ask(a, b)}], "solution": str(a + b)} for a, b in pairs]


def draw_prompts(num_rows, num_prompts, rollout, seed):
    """Row numbers of a rollout: a function of its number, so that a run can go on from any rollout."""
    epoch, place = divmod(rollout, num_rows // num_prompts)
    order = np.random.Generator(np.random.PCG64([seed, epoch])).permutation(num_rows)
    return order[place * num_prompts : (place + 1) * num_prompts].tolist()


# ---- 2. Sampling: completions as a function of the seed ----
def row_key(seed, rollout, prompt_id, sibling):
    """32 bits that name one completion; "train" and 0 are the data split and the first attempt at it."""
    name = f"{seed}/train/{rollout}/0/{prompt_id}/{sibling}"
    return int.from_bytes(hashlib.blake2b(name.encode(), digest_size=4).digest(), "little")


def mix(x):
    """Scramble 32-bit numbers (an int or an int64 tensor): each output bit depends on every input bit."""
    x = x ^ (x >> 16)
    x = (x * 0x7FEB352D) & 0xFFFFFFFF
    x = x ^ (x >> 15)
    x = (x * 0x846CA68B) & 0xFFFFFFFF
    return x ^ (x >> 16)


def gumbel_noise(key_B, position, num_tokens):
    """Gumbel noise (B, V). Adding it to logits and taking the largest is a draw from their softmax.

    What a random generator gives depends on all that was drawn before. This depends on the completion, the
    position and the token alone, so a completion is the same whatever it is batched with.
    """
    token_V = torch.arange(num_tokens, device=key_B.device)
    bits_BV = mix(mix(key_B ^ mix(position))[:, None] ^ mix((token_V * 0x9E3779B1) & 0xFFFFFFFF)[None, :])
    # The largest numbers of 32 bits round to 1 in float32, where the noise would be infinite.
    uniform_BV = ((bits_BV.float() + 0.5) * 2.0**-32).clamp(max=1.0 - 2.0**-24)
    return -(-(-uniform_BV).log1p()).log()


def next_logits(model, token_ids, is_real_BT, keep, temperature, cache=None):
    """Logits (B, keep, V) after the last tokens of rows, of which the cache holds all but `token_ids`."""
    position_BT = (is_real_BT.cumsum(dim=1) - 1).clamp(min=0)
    out = model(
        input_ids=token_ids,
        attention_mask=is_real_BT,
        position_ids=position_BT[:, -token_ids.shape[1] :],
        past_key_values=cache,
        use_cache=cache is not None,
        logits_to_keep=keep,
    )
    return out.logits.float() / temperature


@torch.no_grad()
def sample(model, prompt_BL, is_real_BL, key_B, stop_ids, args):
    """Completions (B, C) and which of their tokens count: all up to and with the one that ends them."""
    stop = torch.tensor(sorted(stop_ids), device=prompt_BL.device)
    is_alive_B = torch.ones_like(key_B, dtype=torch.bool)
    new_ids, is_real_BT, tokens, counts = prompt_BL, is_real_BL, [], []
    # Keys and values of earlier tokens stay in the cache, so only new tokens go through the model.
    cache = DynamicCache(config=model.config)
    for position in range(args.max_completion_length):
        logits_BV = next_logits(model, new_ids, is_real_BT, 1, args.temperature, cache)[:, 0]
        token_B = (logits_BV + gumbel_noise(key_B, position, logits_BV.shape[1])).argmax(dim=1)
        tokens.append(token_B)
        counts.append(is_alive_B)
        is_alive_B = is_alive_B & ~torch.isin(token_B, stop)
        if not is_alive_B.any():
            break
        # Rows that have ended run along to keep the batch a rectangle; nothing reads what they say.
        new_ids = token_B[:, None]
        is_real_BT = torch.cat([is_real_BT, torch.ones_like(new_ids)], dim=1)
    return torch.stack(tokens, dim=1), torch.stack(counts, dim=1)


# ---- 3. Rewards: a number for a text ----

UNTAGGED = r"(?:(?!</?(?:think|answer)>).)*"
FORMAT = re.compile(rf"\s*<think>{UNTAGGED}</think>\s*<answer>{UNTAGGED}</answer>\s*", re.DOTALL)
ANSWER = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)
NUMBER = re.compile(r"[-+]?\d+(?:\.\d+)?")
THOUGHTS = re.compile(r"<think>.*?(?:</think>|\Z)", re.DOTALL)


def reward_of(text, solution):
    """One point for the right number and one for the form, so that either can be learned before the other."""
    # Without tags the last number counts, but in thoughts: a model that does not know the form gets a signal.
    answers = ANSWER.findall(text) or NUMBER.findall(THOUGHTS.sub("", text))
    is_right = bool(answers) and is_equal(answers[-1], solution)
    return float(is_right) + float(FORMAT.fullmatch(text) is not None)


def is_equal(answer, solution):
    try:
        return float(answer) == float(solution)
    except ValueError:
        return answer.strip() == solution.strip()


# ---- 4. Advantages: better or worse than the siblings ----
def group_advantages(reward_PG):
    """How far a completion stands out from its siblings; a group with equal rewards teaches nothing."""
    mean_P1, std_P1 = reward_PG.mean(dim=1, keepdim=True), reward_PG.std(dim=1, keepdim=True)
    return (reward_PG - mean_P1) / (std_P1 + 1e-4)  # equal rewards give 0 and not 0 / 0


# ---- 5. Loss: a policy gradient on a leash ----
def token_logprobs(model, token_MT, is_real_MT, num_completion, temperature):
    """Log-probability (M, C) of every completion token, at the temperature that it was sampled with."""
    # Each place predicts the token after it, so the last prompt token is needed and the last of all is not.
    logits_MCV = next_logits(model, token_MT, is_real_MT, num_completion + 1, temperature)[:, :-1]
    return logits_MCV.log_softmax(dim=-1).gather(2, token_MT[:, -num_completion:, None])[:, :, 0]


def token_losses(logprob_MC, old_MC, reference_MC, advantage_M, args):
    """PPO's clipped objective per token, plus beta times the distance to the reference model."""
    # In the first iteration every ratio is exactly 1; what matters is its gradient, that of logprob.
    ratio_MC = (logprob_MC - old_MC).exp()
    clipped_MC = ratio_MC.clamp(1 - args.epsilon, 1 + args.epsilon_high)
    # The minimum takes away what is gained by moving past the clip, never the pull back from beyond it.
    loss_MC = -torch.minimum(ratio_MC * advantage_M[:, None], clipped_MC * advantage_M[:, None])
    if reference_MC is None:
        return loss_MC
    # k3, an estimate of KL(policy || reference) that is never negative. The samples are the old policy's: the
    # ratio makes its mean, and so its gradient, that of the current one.
    difference_MC = reference_MC - logprob_MC
    return loss_MC + args.beta * ratio_MC * (difference_MC.expm1() - difference_MC)


def token_weights(counts_BC, loss_type):
    """What each token's loss is multiplied with; the weights of a whole step add up to 1."""
    if loss_type == "dapo":  # all tokens of the step alike
        return counts_BC / counts_BC.sum()
    # grpo: all completions alike, so the tokens of a long one weigh less
    return counts_BC / counts_BC.sum(dim=1, keepdim=True) / len(counts_BC)


# ---- 6. Training: sample, score, learn, repeat ----
def main(argv=None):
    args = parse(argv)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    # Padding on the left makes all completions start side by side.
    tokenizer = AutoTokenizer.from_pretrained(args.model, padding_side="left")
    # eval() turns dropout off: a token is as likely when it is learned as when it was sampled.
    model = AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.float32).to(device).eval()
    reference = copy.deepcopy(model).requires_grad_(False) if args.beta else None
    end = model.generation_config.eos_token_id
    stop_ids = {tokenizer.eos_token_id, *(end if isinstance(end, list) else [end])} - {None}
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, weight_decay=0.0)
    rows, G, step = read_rows(args.data), args.num_generations, 0
    with open(args.output or os.devnull, "w", encoding="utf-8") as log:
        while step < args.steps:
            # Sample. Siblings are neighbours: rows 0 to G - 1 answer the first prompt, and so on.
            rollout = step // args.num_iterations
            prompt_ids = draw_prompts(len(rows), args.prompts_per_step, rollout, args.seed)
            key_B = torch.tensor([row_key(args.seed, rollout, i, g) for i in prompt_ids for g in range(G)])
            asked = [rows[i] for i in prompt_ids for _ in range(G)]
            chats = [row["messages"] for row in asked]
            prompt = tokenizer.apply_chat_template(
                chats, add_generation_prompt=True, padding=True, return_dict=True, return_tensors="pt"
            ).to(device)
            prompt_BL, is_real_BL = prompt["input_ids"], prompt["attention_mask"]
            completion_BC, counts_BC = sample(model, prompt_BL, is_real_BL, key_B.to(device), stop_ids, args)

            # Score.
            completion_ids = [ids[n].tolist() for ids, n in zip(completion_BC, counts_BC, strict=True)]
            texts = tokenizer.batch_decode(completion_ids, skip_special_tokens=True)
            rewards = [reward_of(text, row["solution"]) for text, row in zip(texts, asked, strict=True)]
            reward_PG = torch.tensor(rewards, dtype=torch.float64).view(-1, G)
            advantage_B = group_advantages(reward_PG).flatten().float().to(device)

            # Learn. More than one iteration reuses samples that the policy has moved away from: the ratio
            # corrects for that, and the clip bounds how far one rollout can pull.
            token_BT = torch.cat([prompt_BL, completion_BC], dim=1)
            is_real_BT = torch.cat([is_real_BL, counts_BC.long()], dim=1)
            weight_BC = token_weights(counts_BC.float(), args.loss_type)
            forwards = torch.arange(len(token_BT), device=device).split(args.rows_per_forward)
            old, ref = {}, {}
            for _ in range(min(args.num_iterations, args.steps - step)):
                loss = 0.0
                for number, m in enumerate(forwards):
                    batch = (token_BT[m], is_real_BT[m], completion_BC.shape[1], args.temperature)
                    logprob_MC = token_logprobs(model, *batch)
                    if number not in old:
                        # The first iteration has learned nothing yet: this is the policy that sampled.
                        old[number] = logprob_MC.detach()
                        ref[number] = token_logprobs(reference, *batch) if reference else None
                    loss_MC = token_losses(logprob_MC, old[number], ref[number], advantage_B[m], args)
                    # The weights are the whole step's, so the gradients' sum is the same however it is cut.
                    part = (loss_MC * weight_BC[m]).sum()
                    part.backward()
                    loss += part.item()
                grad_norm = torch.nn.utils.clip_grad_norm_(model.parameters(), args.max_grad_norm)
                optimizer.step()
                optimizer.zero_grad()
                step += 1
                line = {
                    "step": step,
                    "reward": reward_PG.mean().item(),
                    "reward_std": reward_PG.std(dim=1).mean().item(),
                    "loss": loss,
                    "grad_norm": grad_norm.item(),
                    "mean_length": counts_BC.sum().item() / len(counts_BC),
                }
                print(json.dumps(line), flush=True)
                print(json.dumps({**line, "completion_ids": completion_ids}), file=log, flush=True)
    if args.save:
        model.save_pretrained(args.save)
        tokenizer.save_pretrained(args.save)


def parse(argv):
    parser = argparse.ArgumentParser(formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    add = parser.add_argument
    # find_spec says where an installed package is and runs none of its code.
    covey = importlib.util.find_spec("covey")
    model = covey and Path(covey.origin).parent / "quickstart" / "model"
    add("--model", default=model, required=covey is None, help="directory of a transformers model")
    add("--data", help="a .jsonl file with messages and solution; without it, two-digit addition")
    add("--output", help="a .jsonl file for the numbers and completions of every step")
    add("--save", help="directory for the trained model")
    add("--steps", type=int, default=400, help="optimizer steps")
    add("--seed", type=int, default=42, help="seed of sampling and of the order of prompts")
    add("--lr", type=float, default=1e-4, help="learning rate; for a full-size model about 1e-6")
    add("--prompts_per_step", type=int, default=8, help="P")
    add("--num_generations", type=int, default=8, help="G")
    add("--rows_per_forward", type=int, default=64, help="M: fewer need less memory and learn the same")
    add("--max_completion_length", type=int, default=32, help="C at most")
    add("--temperature", type=float, default=1.0, help="higher for more variety; no top_p, as in the loss")
    add("--num_iterations", type=int, default=1, help="optimizer steps on each rollout")
    add("--loss_type", choices=["dapo", "grpo"], default="dapo", help="what counts alike")
    add("--epsilon", type=float, default=0.2, help="clip the ratio below 1 - this")
    add("--epsilon_high", type=float, default=0.28, help="clip the ratio above 1 + this")
    add("--beta", type=float, default=0.0, help="weight of the KL to the first model")
    add("--max_grad_norm", type=float, default=1.0, help="longer gradients are scaled down to this")
    return parser.parse_args(argv)


if __name__ == "__main__":
    main()
