"""What a rank records at each optimizer step for the drill."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from hpcinit.records import drill_records

# Three passes of two steps over the data, with an evaluation in the middle of each, and a sampler that creates a new
# generator for each pass.
PROGRAM = """
import random, sys
import torch
from pathlib import Path
from hpcinit.runtime import drill_recorder
drill_recorder.install(Path(sys.argv[1]), 0)
model, given = torch.nn.Linear(2, 1), torch.Generator().manual_seed(7)
model.noise = torch.Generator().manual_seed(8)  # an attribute of an object
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
data = torch.utils.data.TensorDataset(torch.arange(16.0).reshape(8, 2))
train = torch.utils.data.DataLoader(data, batch_size=4, shuffle=True, generator=given)
evaluation = torch.utils.data.DataLoader(data, batch_size=8)
for epoch in range(3):
    augment = random.Random(epoch)
    for (batch,) in train:
        model(batch + torch.rand(1, generator=model.noise)).sum().backward()
        optimizer.step()
        with torch.no_grad():
            for (batch,) in evaluation:
                model(batch)
"""


def test_passes_over_the_data_and_generators(tmp_path: Path) -> None:
    """An evaluation is no pass. A generator keeps its number, and a new one has a new number."""
    folder = tmp_path / "attempt-1"
    folder.mkdir()
    subprocess.run([sys.executable, "-c", PROGRAM, str(folder)], check=True, cwd=tmp_path)
    steps = drill_records.steps(folder, 0)
    assert [step.passes for step in steps] == [1, 1, 2, 2, 3, 3]
    numbers = [set(step.generators.values()) for step in steps]
    kept = set.intersection(*numbers)  # those of the loader and of the libraries
    new = [found - kept for found in numbers]
    assert [len(found) for found in new] == [1] * 6 and new[0] == new[1] != new[2] == new[3] != new[4]
    changed = {name for step in steps for name, number in step.generators.items() if number in kept}
    assert len(changed) == len(kept) + 2 + 5, "the loader has another state in each pass, and the model in each step"


VARIABLES = """
import sys
import torch
from pathlib import Path
from hpcinit.runtime import drill_recorder
drill_recorder.install(Path(sys.argv[1]), 0)

class Average:
    def __init__(self, model):
        self.updates, self.shadow = 0, [p.detach().clone() for p in model.parameters()]
    def update(self, model):
        self.updates += 1
        self.shadow = [(s + p.detach()) / 2 for s, p in zip(self.shadow, model.parameters())]

class Teacher(torch.nn.Module):
    def __init__(self, model):
        super().__init__()
        self.averaged = torch.nn.Sequential(torch.nn.Linear(2, 1))
    def update(self, model):
        with torch.no_grad():
            for own, other in zip(self.parameters(), model.parameters()):
                own.lerp_(other, 0.5)
            self.averaged(torch.ones(1, 2))

def make_step(optimizer, model, average):
    seen = locals()
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    average.update(model)
    unseen = 1
    return [*seen]

def main():
    model = torch.nn.Linear(2, 1)
    average, teacher, names = Average(model), Teacher(model), []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(3):
        names = make_step(optimizer, model, average)
        teacher.update(model)
    assert names == ["optimizer", "model", "average"], names

main()
"""


def test_variables_of_the_program(tmp_path: Path) -> None:
    """Numbers and copies of the weights have the names that the program gives them. locals() returns what it did."""
    folder, program = tmp_path / "attempt-1", tmp_path / "now" / "train.py"
    folder.mkdir()
    program.parent.mkdir()
    program.write_text(VARIABLES)
    subprocess.run([sys.executable, str(program), str(folder)], check=True, cwd=program.parent)
    found = [step.variables for step in drill_records.steps(folder, 0)]
    assert [one["step"] for one in found] == [one["average.updates"] for one in found] == [0, 1, 2]
    for name in ("average.shadow", "teacher"):
        assert len({one[f"{drill_records.COPY}{name}"] for one in found}) == 3, found
    assert not any("unseen" in one or "seen" in one for one in found)
