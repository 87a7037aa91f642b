"""Configs that are refused: what they train for has no counterpart among our settings.

Each function takes another tool's config and returns which keys say so, or None.
"""

import re

from hpc_tune.convert import preferences
from hpc_tune.convert.preferences import SFT
from hpc_tune.convert.rules import OFF, ForeignConfig, WrongTask

_REWARDS = "that is training on rewards"
_NO_LOSS = "that is data of preferences, whose loss the config does not name"
_AFTERWARDS = (
    "Stay with {tool} for this part; supervised fine-tuning before it can be done here, and its "
    "exported model is what {tool} begins with"
)
_NAME_IT = (
    "Name it there (axolotl: rl, torchtune: loss, LLaMA-Factory: stage) and convert it again. "
    "Stay with {tool} for a reward model"
)
_DISTILLATION = "that is distillation, whose loss compares with a teacher's probabilities"
_WITHOUT_TEACHER = (
    "Stay with {tool} for it; or let the teacher write the answers, and convert a config of "
    "supervised fine-tuning with these as data"
)
_IMAGES = "that is training with images, sound or video"
_TEXT_ALONE = (
    "Stay with {tool} for it; if all its records are text, convert a config for text (the language "
    "part of such a model can be trained here)"
)
_MEDIA_TEMPLATE = re.compile(
    r"(?:^|_)(?:vl|vision|video|audio|omni|ocr)(?:_|$)|llava|mllama|pixtral|paligemma|minicpm_[vo]"
    r"|glm4(?:_5)?v|intern_?vl|intern_s1"
)
_MEDIA_BUILDER = re.compile(r"vision|multimodal|\.clip\.|\.flux\.")
_MEDIA_DATA = re.compile(r"multimodal|the_cauldron|vqa|llava_instruct")
_OTHER_LOSS = re.compile(r"rlhf|KTO|ORPO|PPO|GRPO")
_PREFERENCE_DATA = re.compile(r"preference|hh_rlhf|stack_exchange_paired|rlhf")
_PLUGIN_TASKS = (
    (re.compile(r"\.kd\.|KDPlugin"), _DISTILLATION, _WITHOUT_TEACHER),
    (re.compile(r"(?i)diffusion"), "that is training by diffusion", "Stay with {tool} for it"),
    (re.compile(r"(?i)nemo_?gym"), _REWARDS, _AFTERWARDS),
)


def find_llama_factory_task(theirs: ForeignConfig) -> WrongTask | None:
    """Return what a config of LLaMA-Factory trains for, if there is no counterpart."""
    if theirs.get("stage", "sft") not in ("sft", "pt", "dpo", "kto"):
        return WrongTask(("stage",), _REWARDS, _AFTERWARDS)
    if another := preferences.find_other_llama_factory_loss(theirs):
        return another
    if _MEDIA_TEMPLATE.search(str(theirs.get("template", ""))):
        return WrongTask(("template",), _IMAGES, _TEXT_ALONE)
    media = (
        "media_dir visual_inputs image_max_pixels image_min_pixels image_resolution "
        "video_max_pixels video_min_pixels video_fps video_maxlen image_do_pan_and_scan "
        "crop_to_patches use_audio_in_video audio_sampling_rate freeze_vision_tower "
        "freeze_multi_modal_projector freeze_language_model train_mm_proj_only"
    )
    return _find_switched_on(theirs, media, _IMAGES, _TEXT_ALONE)


def find_axolotl_task(theirs: ForeignConfig) -> WrongTask | None:
    """Return what a config of axolotl trains for, if there is no counterpart."""
    plugins = str(theirs.get("plugins", ""))
    for pattern, what, instead in _PLUGIN_TASKS:
        if pattern.search(plugins):
            return WrongTask(("plugins",), what, instead)
    if another := preferences.find_other_axolotl_loss(theirs):
        return another
    is_known = preferences.find_axolotl_objective(theirs) != SFT
    chosen = (
        () if is_known else _match_dataset_keys(theirs, r"(?:type\.)?field_(?:chosen|rejected)")
    )
    rewards = "reward_model process_reward_model" + ("" if is_known else " rl")
    return (
        _find_switched_on(theirs, rewards, _REWARDS, _AFTERWARDS)
        or (WrongTask(chosen, _NO_LOSS, _NAME_IT) if chosen else None)
        or _find_switched_on(
            theirs, "kd_trainer kd_ce_alpha kd_alpha", _DISTILLATION, _WITHOUT_TEACHER
        )
        or _find_distillation(theirs)
        or _find_switched_on(
            theirs,
            "processor_type is_multimodal image_size image_resize_algorithm freeze_mm_modules",
            _IMAGES,
            _TEXT_ALONE,
        )
        or _find_classifier(theirs)
    )


def find_torchtune_task(theirs: ForeignConfig) -> WrongTask | None:
    """Return what a config of torchtune trains for, if there is no counterpart."""
    teacher = tuple(
        key
        for key in ("teacher_model._component_", "kd_loss._component_", "kd_ratio")
        if key in theirs.values
    )
    if teacher:
        return WrongTask(teacher, _DISTILLATION, _WITHOUT_TEACHER)
    if another := preferences.find_other_torchtune_loss(theirs):
        return another
    is_known = preferences.find_torchtune_objective(theirs) != SFT
    of_preferences = (
        ("loss._component_", _OTHER_LOSS, _REWARDS, _AFTERWARDS),
        ("dataset._component_", _PREFERENCE_DATA, _NO_LOSS, _NAME_IT),
    )
    found = (
        ("policy_model._component_", re.compile(""), _REWARDS, _AFTERWARDS),
        *(() if is_known else of_preferences),
        ("loss._component_", re.compile("KL|KD"), _DISTILLATION, _WITHOUT_TEACHER),
        ("dataset._component_", _MEDIA_DATA, _IMAGES, _TEXT_ALONE),
        ("model._component_", _MEDIA_BUILDER, _IMAGES, _TEXT_ALONE),
        ("model._component_", re.compile("classifier"), _REWARDS, _AFTERWARDS),
        ("tokenizer._component_", _MEDIA_BUILDER, _IMAGES, _TEXT_ALONE),
    )
    for key, pattern, what, instead in found:
        if key in theirs.values and pattern.search(str(theirs.get(key))):
            return WrongTask((key,), what, instead)
    return None


def _find_switched_on(
    theirs: ForeignConfig, names: str, what: str, instead: str
) -> WrongTask | None:
    """Return what keys say of which at least one is switched on."""
    found = tuple(name for name in names.split() if theirs.get(name) not in OFF)
    return WrongTask(found, what, instead) if found else None


def _find_classifier(theirs: ForeignConfig) -> WrongTask | None:
    if "Classification" not in str(theirs.get("model_type", "")):
        return None
    return WrongTask(("model_type",), "that trains a classifier", "Stay with {tool} for it")


def _find_distillation(theirs: ForeignConfig) -> WrongTask | None:
    found = _match_dataset_keys(theirs, "logprobs_field")
    return WrongTask(found, _DISTILLATION, _WITHOUT_TEACHER) if found else None


def _match_dataset_keys(theirs: ForeignConfig, name: str) -> tuple[str, ...]:
    pattern = re.compile(rf"(?:test_)?datasets\.\d+\.{name}")
    return tuple(key for key in theirs.values if pattern.fullmatch(key))
