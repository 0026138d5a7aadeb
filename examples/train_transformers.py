"""BERT by Hugging Face's Trainer, small and with random weights. Needs: pip install layerwise[huggingface]

python examples/train_transformers.py
torchrun --nproc-per-node 2 examples/train_transformers.py
"""

import argparse
import os
import tempfile

import torch
from transformers import BertConfig, BertForSequenceClassification, TrainerCallback, TrainingArguments

import layerwise
from layerwise.integrations.transformers import LayerwiseTrainer


class Losses(TrainerCallback):
    def on_log(self, args, state, control, logs, **named):
        if "loss" in logs and state.is_world_process_zero:
            print(f"step {state.global_step}: loss {float(logs['loss']):.4f}")


def main(steps: int, measure_s: float, out: str | None) -> None:
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    model = BertForSequenceClassification(BertConfig(vocab_size=128, max_position_embeddings=32, **sizes))
    texts = [{"input_ids": ids, "labels": (ids[0] < 64).long()} for ids in torch.randint(128, (8, 16))]
    arguments = TrainingArguments(
        out or tempfile.mkdtemp(),
        per_device_train_batch_size=8 // int(os.environ.get("WORLD_SIZE", "1")),
        max_steps=steps,
        learning_rate=1e-2,
        logging_steps=1,
        save_strategy="no" if out is None else "steps",
        save_steps=steps,
        report_to=[],
        disable_tqdm=True,
        use_cpu=not torch.cuda.is_available(),
    )
    options = layerwise.ParallelOptions(measure_s=measure_s)
    trainer = LayerwiseTrainer(  # was: Trainer(...)
        model, arguments, train_dataset=texts, callbacks=[Losses()], keywords={"options": options}
    )
    trainer.train()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument(
        "--measure-s", type=float, default=0.0, help="seconds to measure this machine; 30 for real work"
    )
    parser.add_argument("--out", metavar="FOLDER", help="for checkpoints that from_pretrained reads")
    main(**vars(parser.parse_args()))
