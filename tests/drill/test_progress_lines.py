"""Steps and losses in the output of training loops."""

from __future__ import annotations

import pytest

from hpcinit.base.errors import RequestError
from hpcinit.drill import progress_lines

# Lines as the frameworks print them: two steps, then the loss of the second.
LINES = {
    "nanoGPT": (
        b"iter 0: loss 4.2874, time 9.25ms, mfu -100.00%\niter 1: loss 4.1, time 9.1ms\niter 2: loss 3.5, t\n",
        3,
        3.5,
    ),
    "plain": (b"step 1 loss 2.5\nstep 2 loss 2.25\nstep 3 loss 1e-2\n", 3, 0.01),
    "epochs": (
        b"epoch 0 step 1: train_loss 0.7\nepoch 0 step 2: train_loss 0.6\nepoch 1 step 3: train_loss 0.5\n",
        3,
        0.5,
    ),
    "json": (b'{"step": 1, "loss": 2.5}\n{"step": 2, "loss": 2.25}\n{"step": 3, "loss": 2.0, "lr": 0.1}\n', 3, 2.0),
    "Megatron": (
        b" [2024-05-01 10:00:00] iteration        1/     500 | consumed samples:  16 | learning rate: 1.5E-04 | "
        b"lm loss: 1.08E+01 | grad norm: 2.1 |\n iteration 2/ 500 | lm loss: 1.07E+01 |\n iteration 3/ 500 | lm loss: 1.05E+01 |\n",
        3,
        10.5,
    ),
    "Trainer 4": (
        b"{'loss': 4.1, 'grad_norm': 1.5, 'learning_rate': 5e-05, 'epoch': 0.07}\n{'loss': 3.9, 'epoch': 0.14}\n"
        b"{'loss': 3.7, 'epoch': 0.21}\n{'train_runtime': 3.1, 'train_loss': 3.9, 'epoch': 0.21}\n",
        3,
        3.7,
    ),
    "Trainer 5": (
        b"{'loss': '4.1', 'grad_norm': '1.5', 'epoch': '0.07'}\n{'loss': '3.9', 'epoch': '0.14'}\n{'loss': '3.7', 'epoch': '0.21'}\n",
        3,
        3.7,
    ),
    "Lightning": (
        b"\rEpoch 0:  50%|#####     | 1/2 [00:00<00:00, 12.1it/s, v_num=0, train_loss=2.50]"
        b"\rEpoch 0: 100%|##########| 2/2 [00:00<00:00, 12.1it/s, v_num=0, train_loss=2.25]"
        b"\rEpoch 1:  50%|#####     | 1/2 [00:00<00:00, 12.1it/s, v_num=0, train_loss=2.00]\r\n",
        3,
        2.0,
    ),
    "DeepSpeed": (
        b"step=1, skipped=0, lr=[0.001], loss=2.5\nstep=2, lr=[0.001], loss=2.4\nstep=3, lr=[0.001], loss=2.3\n",
        3,
        2.3,
    ),
    "MetricLogger": (
        b"Epoch: [0]  [ 0/4]  eta: 0:00:01  lr: 0.010000  loss: 2.5000 (2.5000)\n"
        b"Epoch: [0]  [ 2/4]  eta: 0:00:01  loss: 2.4 (2.4)\nEpoch: [1]  [ 0/4]  eta: 0:00:01  loss: 2.3 (2.4)\n",
        3,
        2.3,
    ),
    "language model": (
        b"| epoch   1 |    20/   64 batches | lr 20.00 | ms/batch  5.1 | loss  7.61 | ppl  2011.5\n"
        b"| epoch   1 |    40/   64 batches | loss  6.50 |\n| epoch   2 |    20/   64 batches | loss  6.25 |\n"
        b"| end of epoch   2 | time:  1.2s | valid loss  6.40 | valid ppl   601.8\n",
        3,
        6.25,
    ),
    "fairseq": (
        b'{"epoch": 1, "update": 0.5, "loss": "4.2", "num_updates": "2", "lr": "0.1"}\n'
        b'{"epoch": 1, "update": 1.0, "loss": "4.1", "num_updates": "4"}\n'
        b'{"epoch": 2, "update": 1.5, "loss": "4.0", "num_updates": "6"}\n',
        3,
        4.0,
    ),
    "timm": (
        b"Train: 0 [   0/4 (  0%)]  Loss: 2.50 (2.50)  Time: 0.1s  LR: 1.0e-02\nTrain: 0 [   2/4 ( 67%)]  Loss: 2.40 (2.5)\n"
        b"Test: 0  Acc@1: 10.0\nTrain: 1 [   0/4 (  0%)]  Loss: 2.30 (2.30)\n",
        3,
        2.3,
    ),
    "VAE": (
        b"Train Epoch: 1 [0/160 (0%)]\tLoss: 0.90\nTrain Epoch: 1 [32/160 (20%)]\tLoss: 0.85\n"
        b"Train Epoch: 2 [0/160 (0%)]\tLoss: 0.80\n====> Epoch: 2 Average loss: 0.8100\n",
        3,
        0.8,
    ),
    "a step in each epoch": (
        b"INFO:root:epoch=0 step=1 loss=2.5\nINFO:root:epoch=0 step=2 loss=2.25\nINFO:root:epoch=1 step=1 loss=2.0\n",
        3,
        2.0,
    ),
    "a batch in each epoch": (
        b'{"epoch": 0, "batch": 0, "train/loss": 2.5}\n{"epoch": 0, "batch": 1, "train/loss": 2.25}\n'
        b'{"epoch": 1, "batch": 0, "train/loss": 2.0}\n',
        3,
        2.0,
    ),
    "one line per epoch": (
        b"Epoch 1/3 train_loss 0.5 val_loss 0.6\nEpoch 2/3 train_loss 0.4\nEpoch 3/3 train_loss 0.3 val_loss 0.6\n",
        3,
        0.3,
    ),
    "DCGAN": (
        b"[0/5][62/64]\tLoss_D: 1.50\tLoss_G: 2.10\n[0/5][63/64]\tLoss_D: 1.40\tLoss_G: 2.0\n"
        b"[1/5][0/64]\tLoss_D: 1.30\tLoss_G: 1.9\n",
        3,
        1.3,
    ),
}


@pytest.mark.parametrize("name", LINES)
def test_the_output_of_frameworks_is_recognized(name: str) -> None:
    """The table of formats finds each step, and its loss, but no loss of an evaluation."""
    data, count, loss = LINES[name]
    reader = progress_lines.best_reader(data)
    assert reader is not None
    found = progress_lines.points(data, 0, reader)
    assert (len(found), found[-1].loss) == (count, loss)
    assert [point.step for point in found] == sorted(point.step for point in found)


def test_other_output_has_no_steps() -> None:
    """Lines without a step and a loss are no progress; neither are two lines."""
    assert progress_lines.best_reader(b"loading data\nstep 1 done\nstep 2 done\nstep 3 done\n") is None
    assert progress_lines.best_reader(b"step 1 loss 2\nstep 2 loss 1\n") is None
    repeated = b"step 1 loss 2\nstep 2 loss 1\n" * 3  # in each epoch, without a number of the epoch
    assert progress_lines.best_reader(repeated) is None


def test_the_epoch_of_a_line_with_a_step() -> None:
    """The epoch may be in brackets before the step."""
    lines = b"".join(b"Epoch: [1]  [%d/9]  step: %d  lr: 0.1  loss: 2.5\n" % (step, 9 + step) for step in (1, 2, 3))
    reader = progress_lines.best_reader(lines)
    assert reader is not None
    assert [point.values["epoch"] for point in progress_lines.points(lines, 0, reader)] == [1, 1, 1]


def test_a_pattern_of_the_user() -> None:
    """drill.pattern reads steps from lines that no format fits, and named groups become values."""
    reader = progress_lines.reader_of(r"it=(?P<step>\d+) L=(?P<loss>\S+) r=(?P<lr>\S+)")
    (point,) = progress_lines.points(b"x\nit=7 L=0.5 r=1e-3\nhalf a line it=8", 0, reader)
    assert (point.step, dict(point.values)) == (7, {"loss": 0.5, "lr": 0.001})


@pytest.mark.parametrize(
    ("pattern", "message"), [("it=(", "is not a regular expression"), ("it=(\\d+)", "has no group 'step'")]
)
def test_a_wrong_pattern_is_refused(pattern: str, message: str) -> None:
    """An invalid pattern, or one without a step, is an error that shows a correct one or the position."""
    with pytest.raises(RequestError, match=message):
        progress_lines.reader_of(pattern)
