"""An export carries all chat templates, and a tokenizer that others read as it was trained with."""

import json
import shutil

import pytest
from transformers import AutoTokenizer

from hpc_tune.checkpoint.export import copy_tokenizer, replace_folder
from hpc_tune.checkpoint.export_metadata import write_chat_templates
from tests.support.data import CHATML, byte_tokenizer
from tests.unit.model.test_tokenizer_file import TEXT, write

TOOL_USE = "tools " + CHATML


def base_with(folder, how):
    """A base whose tokenizer has several templates, as it is written today or was earlier."""
    byte_tokenizer(template=None).save_pretrained(folder)
    (folder / "chat_template.jinja").unlink(missing_ok=True)
    file = folder / "tokenizer_config.json"
    settings = json.loads(file.read_text())
    match how:
        case "list":
            named = {"default": CHATML, "tool_use": TOOL_USE}
            settings["chat_template"] = [{"name": n, "template": t} for n, t in named.items()]
        case "files":
            (folder / "chat_template.jinja").write_text(CHATML)
            (folder / "additional_chat_templates").mkdir()
            (folder / "additional_chat_templates" / "tool_use.jinja").write_text(TOOL_USE)
        case "processor":
            (folder / "chat_template.json").write_text(json.dumps({"chat_template": CHATML}))
    file.write_text(json.dumps(settings))
    return folder


def exported(base, out, template=None):
    with replace_folder(out, base) as temporary:
        copy_tokenizer(base, temporary)
        (temporary / "adapter_model.safetensors").touch()
        write_chat_templates(template, base, temporary)
    return AutoTokenizer.from_pretrained(out)


@pytest.mark.parametrize("how", ["list", "files"])
def test_all_named_templates_are_in_an_export_which_can_be_written_again(how, tmp_path):
    base = base_with(tmp_path / "base", how)
    for _ in range(2):
        templates = exported(base, tmp_path / "out").chat_template
        assert templates == {"default": CHATML, "tool_use": TOOL_USE}
    assert exported(base, tmp_path / "out", template="mine").chat_template == "mine"


def test_the_processors_template_is_in_an_export_where_tokenizers_look_for_it(tmp_path):
    base = base_with(tmp_path / "base", "processor")
    assert exported(base, tmp_path / "out").chat_template == CHATML


def test_an_exported_tokenizer_makes_the_tokens_that_were_trained_with(tmp_path, caplog):
    file = write(tmp_path / "base", "GPT2Tokenizer")
    before = AutoTokenizer.from_pretrained(tmp_path / "base")
    assert before(TEXT).input_ids != file.encode(TEXT).ids
    assert exported(tmp_path / "base", tmp_path / "out")(TEXT).input_ids == file.encode(TEXT).ids
    model = {"model_type": "qwen2", "vocab_size": 320}
    shutil.copytree(tmp_path / "out", tmp_path / "merged")
    (tmp_path / "merged" / "config.json").write_text(json.dumps(model))
    write_chat_templates(None, tmp_path / "base", tmp_path / "merged")
    assert "whatever tokenizer_class says" in caplog.text  # transformers has a list of such models
