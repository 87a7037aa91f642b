"""What tells a model from another one of the same shapes."""

import torch
from safetensors.torch import save_file

from hpc_tune.model.weights import fingerprint_weights, index_files


def sampled(folder, *files):
    folder.mkdir()
    paths = [folder / f"{number}.safetensors" for number in range(len(files))]
    for path, tensors in zip(paths, files, strict=True):
        save_file(tensors, path)
    return fingerprint_weights(index_files(paths))


def test_one_changed_tensor_makes_another_model_and_other_files_do_not(tmp_path):
    generator = torch.Generator().manual_seed(1)
    one = {
        "a": torch.randn(300, 500, generator=generator),
        "b": torch.randn(7, generator=generator),
        "c": torch.tensor(2.0),
        "d": torch.empty(0, 4),
        "e": torch.randn(3, 5, 2, generator=generator),
    }
    same = sampled(tmp_path / "one", one)
    bf16 = {name: values.bfloat16() for name, values in one.items()}
    assert sampled(tmp_path / "bf16", {"b": bf16.pop("b")}, bf16) == same
    others = {
        sampled(tmp_path / name, one | {name: one[name] + 0.1}) for name in one if name != "d"
    }
    assert len({same} | others) == 5


def test_of_more_than_a_thousand_tensors_each_kind_is_looked_at(tmp_path):
    def model(kind=""):
        return {
            f"layers.{layer}.{name}": torch.full((2,), 2.0 if name == kind else 1.0)
            for layer in range(300)
            for name in ("q", "k", "v", "o", "up", "gate", "down", "norm")
        }

    samples = [sampled(tmp_path / f"of-{kind}", model(kind)) for kind in ("", "q", "v", "norm")]
    assert len(set(samples)) == 4
