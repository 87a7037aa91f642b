"""The page of architectures: written in parts, as if it were written whole."""

import sys

from tests.support.ranks import ROOT

sys.path.insert(0, str(ROOT / "tools"))

from matrix_page import LAYOUTS, Note, Page  # noqa: E402

KNOWN = ["bamba", "jamba", "mixtral", "xlnet"]


def page(names, methods, gap):
    made = Page()
    for name in names:
        for method in methods:
            made.rows[name, method] = ["yes", gap, gap, "-", "-", gap, gap, gap]
            made.notes.append(Note(name, f"{method}, zero3", f"{gap} cannot be."))
        made.notes.append(Note(name, "tensor", f"{gap} has no plan."))
    return made


def same(one, other):
    return one.rows == other.rows and sorted(one.notes) == sorted(other.notes)


def test_a_written_page_is_read_as_it_was():
    made = page(["bamba", "mixtral"], ["lora", "qlora"], "1e-07")
    made.notes.append(Note("xlnet", "", "a document's loss is 1."))
    text = made.text("torch", KNOWN)
    assert same(Page.read(text), made)
    made.rows["jamba", "lora"] = ["no", "", "1e-07", "", "", "-", "", ""]  # some not tried
    assert same(Page.read(made.text("torch", KNOWN)), made)
    assert Page.read(text).text("torch", KNOWN) == text


def test_what_was_tried_anew_takes_the_place_of_what_was_said_and_the_rest_stays():
    old = page(["bamba", "jamba"], ["lora", "dora"], "1e-07")
    old.notes.append(Note("mixtral", "", "it has experts."))
    new = page(["jamba", "mixtral"], ["lora", "qlora"], "2e-07")
    layouts = ["zero3", "tensor", "expert", "expert4"]
    found = old.update(new, ["jamba", "mixtral"], ["lora", "qlora"], layouts)
    untried = {("jamba", "dora"), ("bamba", "lora"), ("bamba", "dora")}
    assert found.rows == {
        **{key: old.rows[key] for key in untried},
        ("jamba", "lora"): ["yes", "1e-07", "1e-07", "-", "-", *["2e-07"] * 3],
        ("jamba", "qlora"): ["yes", "", "", "-", "", *["2e-07"] * 3],
        ("mixtral", "lora"): ["yes", "", "", "-", "", *["2e-07"] * 3],
        ("mixtral", "qlora"): ["yes", "", "", "-", "", *["2e-07"] * 3],
    }
    assert found.notes == [
        Note("bamba", "lora, zero3", "1e-07 cannot be."),
        Note("bamba", "dora, zero3", "1e-07 cannot be."),
        Note("bamba", "tensor", "1e-07 has no plan."),
        Note("jamba", "dora, zero3", "1e-07 cannot be."),
        *new.notes,
    ]


def test_what_is_refused_now_has_no_rows_any_more():
    old = page(["bamba", "jamba"], ["lora"], "1e-07")
    no = Note("jamba", "", "no.")
    found = old.update(Page(notes=[no]), ["jamba"], ["lora"], ["one"])
    assert set(found.rows) == {("bamba", "lora")}
    assert no in found.notes
    assert "- **in all** (jamba): no.\n" in found.text("torch", KNOWN)


def test_a_page_of_fewer_layouts_is_read_with_the_others_not_tried():
    text = "| architecture | packed | method | one |\n|---|---|\n| jamba | no | lora | 2e-07 |"
    assert Page.read(text).rows == {("jamba", "lora"): ["no", "2e-07", *[""] * (len(LAYOUTS) - 1)]}


def test_a_reason_of_several_architectures_is_written_once():
    text = page(["jamba", "bamba"], ["lora"], "1e-07").text("torch", KNOWN)
    assert "- **tensor** (bamba, jamba): 1e-07 has no plan.\n" in text
    assert text.count("has no plan") == 1
