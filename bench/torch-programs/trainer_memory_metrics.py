"""Hugging Face's Trainer with its memory metrics, which read and reset PyTorch's peaks."""

import tempfile

import torch
from report import finish, needs, seed

with needs("accelerate"):
    import accelerate  # noqa: F401
with needs("transformers"):
    from transformers import BertConfig, BertForSequenceClassification, Trainer, TrainingArguments

seed()
config = BertConfig(vocab_size=500, hidden_size=64, num_hidden_layers=2, num_attention_heads=4, intermediate_size=128)
config.hidden_dropout_prob = config.attention_probs_dropout_prob = 0.0
model = BertForSequenceClassification(config)
rows = [
    {"input_ids": torch.randint(0, 500, (32,)), "attention_mask": torch.ones(32, dtype=torch.long), "labels": number % 2}
    for number in range(128)
]
with tempfile.TemporaryDirectory() as folder:
    arguments = TrainingArguments(
        output_dir=folder,
        max_steps=20,
        per_device_train_batch_size=8,
        logging_steps=5,
        save_strategy="no",
        report_to=[],
        skip_memory_metrics=False,
        torch_empty_cache_steps=2,
        disable_tqdm=True,
        seed=1,
    )
    trainer = Trainer(model=model, args=arguments, train_dataset=rows, eval_dataset=rows[:16])
    trained = trainer.train()
    evaluated = trainer.evaluate()
metrics = {**trained.metrics, **evaluated}
gpu = sorted(key for key in metrics if "_mem_gpu_" in key)
finish(
    [entry["loss"] for entry in trainer.state.log_history if "loss" in entry] + [evaluated["eval_loss"]],
    {"metrics": gpu, "peaked": metrics["train_mem_gpu_peaked_delta"] > 0},
)
