#!/usr/bin/env python3
"""Trains the policy of an echoline run with TRL's GRPOTrainer, on the rollouts of its fleet.

docs/how-to/train-with-trl.md says what TRL computes. Needs trl 1.16, and a run with `learner.trainer: external`:

    examples/trl_grpo.py runs/NAME [--learning-rate 2e-4]
"""
import argparse
import pathlib
import sys

import torch
from transformers import AutoModelForCausalLM

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent / "clients" / "python"))
import echoline  # noqa: E402
from echoline.trl import EcholineGRPOTrainer, EcholineRollouts, PublishCallback, task_reward  # noqa: E402


def main():
    arguments = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    arguments.add_argument("run", help="the run's folder")
    arguments.add_argument("--output", default="trl-grpo", help="TRL's folder")
    arguments.add_argument("--learning-rate", type=float, default=2e-4)
    arguments.add_argument("--updates", type=int, default=2, help="optimizer steps for each batch")
    arguments.add_argument("--threads", type=int, default=1)
    a = arguments.parse_args()
    torch.set_num_threads(a.threads)
    rollouts = EcholineRollouts(a.run)
    gpu = torch.cuda.is_available()
    trainer = EcholineGRPOTrainer(
        model=AutoModelForCausalLM.from_pretrained(rollouts.model, dtype=torch.float32),
        reward_funcs=task_reward,
        args=rollouts.arguments(a.output, updates=a.updates, learning_rate=a.learning_rate, adam_beta2=0.99,
                                lr_scheduler_type="constant_with_warmup", warmup_steps=10, epsilon_high=0.28,
                                logging_steps=1, bf16=gpu, use_cpu=not gpu, gradient_checkpointing=gpu,
                                dataloader_pin_memory=gpu, disable_tqdm=True),
        train_dataset=rollouts.dataset(),
        rollout_func=rollouts,
        callbacks=[PublishCallback(rollouts, evaluate=True)],
    )
    trainer.train()


if __name__ == "__main__":
    try:
        main()
    except echoline.Error as error:
        sys.exit(f"trl_grpo: {error}")
