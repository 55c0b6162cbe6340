"""On two CPU processes, in a folder with a recipe: trains and evaluates by the command line, and
trains with Trainers of Lightning's own, with and without a bar of theirs. Run by
test_processes.py."""

from pathlib import Path

import lightning as L
import yaml
from lightning.pytorch.callbacks import TQDMProgressBar
from lightning.pytorch.loggers import CSVLogger

from runs import KeepWeights, data, make_module
from turnrl.cli import main


def plain(model: str, name: str, share: bool, *callbacks: L.Callback) -> None:
    L.seed_everything(0, verbose=False)
    trainer = L.Trainer(
        max_epochs=2,
        accelerator="cpu",
        devices=2,
        strategy="ddp",
        logger=CSVLogger("runs", name=name),
        callbacks=[KeepWeights(), *callbacks],
        log_every_n_steps=1,
    )
    policy = {"share_prefixes": share, "minibatch_tokens": 100}
    trainer.fit(make_module(model, policy), data())


def by_recipe() -> None:
    assert main(["fit", "two.yaml"]) == 0
    checkpoint = Path("runs/two/version_0/checkpoints/last.ckpt")
    for split, limit in (("val", 3), ("train", 5), ("val", 1)):
        options = ["--ckpt_path", str(checkpoint), "--split", split, "--data.val_limit", str(limit)]
        assert main(["eval", "two.yaml", *options]) == 0


if __name__ == "__main__":
    # by arguments it would not know its model: the command line sets those of the other process
    by_recipe()
    model = yaml.safe_load(Path("two.yaml").read_text())["model"]["policy"]["model"]
    plain(model, "plain", share=True)
    plain(model, "padded", False, TQDMProgressBar())
