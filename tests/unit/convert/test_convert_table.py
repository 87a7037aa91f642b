"""What comes of a key of another tool's config, by table.

A row: which config, what is changed in it, and what comes of it. Indented lines go on with a row.
"""

import re

import pytest
import yaml

from hpc_tune import cli
from hpc_tune.convert import convert as command
from hpc_tune.errors import EXIT_USER_ERROR
from tests.support.converting import CONFIGS, line_of, on_four_ranks, settings, theirs

# What is said elsewhere, or by default, counts too; null: our setting stays as it is.
TAKEN = r"""
axolotl {adapter: null} => {tune.method: full, tune.rank: null, tune.dropout: null}
axolotl {adapter: qlora, load_in_4bit: true} => {tune.method: qlora}
axolotl {load_in_4bit: true} => {tune.method: qlora}
axolotl {peft: {backend: bnb, weight_dtype: nf4}} => {tune.method: qlora}
axolotl {peft_use_dora: true} => {tune.method: dora}
axolotl {lora_target_linear: true} => {tune.targets: all-linear}
axolotl {peft_trainable_token_indices: [5, 6]} => {tune.trainable_tokens: [5, 6]}
axolotl {lora_modules_to_save: [lm_head]} => {tune.modules_to_save: [lm_head]}
axolotl {lora_target_modules: all-linear} => {tune.targets: all-linear}
axolotl {lora_target_parameters: [mlp.experts.gate_up_proj, mlp.experts.down_proj]} =>
    {tune.targets: [q_proj, k_proj, v_proj, o_proj, experts]}
axolotl {lora_target_parameters: [mlp.experts.gate_up_proj, mlp.experts.down_proj],
    lora_target_linear: true, lora_r: 8} => {tune.targets: [all-linear, experts],
    tune.expert_rank: 8}
axolotl {lora_target_parameters: [mlp.experts.gate_up_proj, mlp.experts.down_proj],
    lora_target_modules: null} => {tune.targets: [experts]}
axolotl {lora_model_dir: ./first} => {tune.init_from: ./first}
axolotl {adapter: null, deepspeed: null} => {tune.param_dtype: bf16}
axolotl {adapter: null} => {tune.param_dtype: null}
axolotl {bf16: auto} => {model.dtype: auto}
axolotl {bf16: null, float32: true} => {model.dtype: null}
axolotl {bf16: false} => {model.dtype: fp32}
axolotl {bf16: false, bfloat16: true} => {model.dtype: bf16}
axolotl {bf16: false, fp16: true} => {model.dtype: null}
axolotl {sequence_len: null} => {data.seq_len: 512}
axolotl {sample_packing: null} => {data.packing: false}
axolotl {train_on_inputs: true} => {data.loss_on: all}
axolotl {chat_template_jinja: mine.jinja} => {data.chat_template: mine.jinja}
axolotl {micro_batch_size: null} => {batch.global_size: 32}
axolotl {batch_size: 24, gradient_accumulation_steps: null} => {batch.global_size: 96}
axolotl {sequence_parallel_degree: 4} => {batch.global_size: 16, parallel.context: 4}
axolotl {sequence_parallel_degree: 4, context_parallel_size: 4} => {batch.global_size: 16,
    parallel.context: 4}
axolotl {context_parallel_size: 1} => {parallel.context: null}
torchtune {context_parallel_dim: 2, compile: true} => {parallel.context: 2, train.compile: null}
axolotl {tensor_parallel_size: 2} => {batch.global_size: 32}
axolotl {max_steps: 40} => {train.max_steps: 40, train.epochs: null}
axolotl {num_epochs: null} => {train.epochs: 1.0}
axolotl {warmup_steps: null} => {optim.warmup_steps: null, optim.warmup_ratio: null}
axolotl {warmup_steps: null, warmup_ratio: 0.05} => {optim.warmup_steps: null, optim.warmup_ratio:
    0.05}
axolotl {lr_scheduler: null} => {optim.schedule: cosine, optim.min_lr_ratio: 0.0}
axolotl {cosine_min_lr_ratio: 0.2} => {optim.min_lr_ratio: 0.2}
axolotl {lr_scheduler: constant_with_warmup} => {optim.schedule: constant}
axolotl {adam_beta2: 0.95, max_grad_norm: 0.3} => {optim.beta2: 0.95, optim.clip_norm: 0.3}
axolotl {gradient_checkpointing: offload} => {parallel.recompute: full}
axolotl {gradient_checkpointing: false} => {parallel.recompute: null}
axolotl {save_strategy: best} => {checkpoint.keep_best: true}
axolotl {profiler_steps: 3, profiler_steps_start: 7} => {train.profile: '8:3'}
axolotl {wandb_project: p, wandb_mode: disabled} => {run.trackers: []}
axolotl {peft_use_rslora: true} => {tune.rslora: true}
axolotl {lora_rank_pattern: {.*\.layers\.3\..*(q|k)_proj$: 32, layers.0.mlp.*: 4},
    lora_alpha_pattern: {.*\.layers\.3\..*(q|k)_proj$: 128}} => {tune.rank_pattern:
    {.*\.layers\.3\..*(q|k)_proj$: 32, layers.0.mlp.*: 4}, tune.alpha_pattern:
    {.*\.layers\.3\..*(q|k)_proj$: 128}}
axolotl {neftune_noise_alpha: 5} => {tune.neftune_alpha: 5}
axolotl {noisy_embedding_alpha: 5} => {tune.neftune_alpha: 5}
axolotl {optimizer: adamw_bnb_8bit} => {optim.name: adamw_8bit}
axolotl {optimizer: adamw_torch_8bit} => {optim.name: adamw_8bit}
axolotl {loraplus_lr_ratio: 16} => {optim.lora_b_ratio: 16}
axolotl {val_set_size: 0.1, eval_steps: 20, early_stopping_patience: 3} =>
    {train.stop_after_evals: 3}
axolotl {seed: 7} => {train.seed: 7}
axolotl {datasets: [{path: data/train.jsonl}]} => {data.path: data/train.jsonl}
axolotl {datasets: [{path: /data/set}]} => {data.path: /data/set}
axolotl {datasets: [{path: /d, data_files: [a.jsonl]}]} => {data.path: /d/a.jsonl}
axolotl {datasets: [{path: /d/a.jsonl, data_files: [/d/a.jsonl]}]} => {data.path: /d/a.jsonl}
axolotl {datasets: [{path: csv, data_files: a.csv.gz}]} => {data.path: a.csv.gz}
axolotl {datasets: [{path: a.jsonl, type: oasst}, {path: b.jsonl, field_messages: turns}]} =>
    {data.path: [a.jsonl, b.jsonl], data.columns: {INSTRUCTION: instruction, RESPONSE: output,
    turns: messages}}
axolotl {datasets: [{path: a.jsonl, type: alpaca_chat.load_qa}]} => {data.columns: null}
axolotl {datasets: [{path: a.jsonl, type: sharegpt.load_role}]} => {data.columns: null}
torchtune {model._component_: t.qlora_llama3_1_8b} => {tune.method: qlora}
torchtune {model.use_dora: true} => {tune.method: dora}
torchtune {model._component_: t.llama3_8b, model.lora_rank: null} => {tune.method: full,
    tune.param_dtype: bf16, tune.rank: null, tune.alpha: null, tune.targets: null}
torchtune {model.use_dora: true, model.quantize_base: true} => {tune.method: qlora}
torchtune {model.lora_attn_modules: [q_proj, k_proj, v_proj, output_proj],
    model.apply_lora_to_mlp: true} => {tune.targets: all-linear}
torchtune {model.apply_lora_to_mlp: true, model.apply_lora_to_output: true} => {tune.targets:
    [q_proj, v_proj, o_proj, gate_proj, up_proj, down_proj, lm_head]}
torchtune {dataset.packed: null} => {data.packing: false}
torchtune {dataset.train_on_input: true} => {data.loss_on: all}
torchtune {dataset.data_files: /data/*.csv} => {data.path: /data/*.csv}
torchtune {dataset._component_: torchtune.datasets.instruct_dataset, dataset.column_map: {input:
    question, output: reply}} => {data.columns: {question: prompt, reply: completion}}
torchtune {dataset.conversation_column: dialogue} => {data.columns: {dialogue: messages}}
torchtune {metric_logger: {_component_: t.WandBLogger}} => {run.trackers: [wandb]}
torchtune {dataset._component_: torchtune.datasets.alpaca_dataset, dataset.train_on_input: null}
    => {data.loss_on: all}
torchtune {optimizer._component_: bitsandbytes.optim.PagedAdamW8bit, fsdp_cpu_offload: false} =>
    {optim.name: adamw_8bit}
torchtune {optimizer._component_: torchao.optim.AdamW8bit} => {optim.name: null}
torchtune {clip_grad_norm: null} => {optim.clip_norm: 0.0}
torchtune {lr_scheduler: null} => {optim.schedule: constant, optim.warmup_steps: 0}
torchtune {max_steps_per_epoch: 7} => {train.max_steps: 14}
torchtune {enable_activation_checkpointing: false} => {parallel.recompute: none}
torchtune {dataset_val.data_files: /data/held.jsonl, run_val_every_n_steps: 9} => {data.eval_path:
    /data/held.jsonl, train.eval_every_steps: 9}
torchtune {tensor_parallel_dim: 2} => {batch.global_size: 30}
torchtune {checkpointer.checkpoint_dir: '${output_dir}'} => {model.path: /runs/here}
torchtune {output_dir: '${oc.env:HOME}/x'} => {run.dir: '${oc.env:HOME}/x'}
torchtune {my_seed: 5, seed: '${my_seed}'} => {train.seed: 5}
factory {quantization_bit: 4} => {tune.method: qlora}
factory {use_dora: true} => {tune.method: dora}
factory {lora_target: all} => {tune.targets: all-linear}
factory {lora_rank: null} => {tune.rank: 8, tune.alpha: 16.0}
factory {finetuning_type: full} => {tune.method: full, tune.rank: null}
factory {finetuning_type: full, pure_bf16: true} => {tune.param_dtype: bf16}
factory {neat_packing: true} => {data.packing: true}
factory {train_on_prompt: true} => {data.loss_on: all}
factory {max_steps: null} => {train.epochs: 3.0, optim.warmup_ratio: 0.1}
factory {val_size: 0.1} => {data.eval_fraction: 0.1}
factory {val_size: 0.1, eval_steps: 20} => {train.eval_every_steps: 20}
factory {eval_steps: 20} => {train.eval_every_steps: null}
factory {val_size: 0.1, eval_steps: 20, early_stopping_steps: 3} => {train.stop_after_evals: 3,
    checkpoint.keep_best: true}
factory {early_stopping_steps: 3} => {train.stop_after_evals: null}
factory {save_strategy: best} => {checkpoint.keep_best: true}
factory {use_cpu: true} => {run.device: cpu}
factory {use_rslora: true} => {tune.rslora: true}
factory {neftune_noise_alpha: 5} => {tune.neftune_alpha: 5}
factory {optim: adamw_8bit} => {optim.name: adamw_8bit}
factory {optim: adamw_torch_4bit} => {optim.name: null}
factory {loraplus_lr_ratio: 16.0} => {optim.lora_b_ratio: 16.0}
factory {loraplus_lr_ratio: 16.0, finetuning_type: full} => {optim.lora_b_ratio: null}
factory {use_rslora: true, finetuning_type: full} => {tune.rslora: null}
factory {max_steps: -1} => {train.epochs: 3.0, train.max_steps: null}
factory {warmup_ratio: null, warmup_steps: 30} => {optim.warmup_steps: 30}
factory {warmup_ratio: 0.5, warmup_steps: 30, max_steps: null} => {optim.warmup_steps: 30,
    optim.warmup_ratio: null}
factory {warmup_ratio: 0.5, warmup_steps: 0, max_steps: null} => {optim.warmup_steps: null,
    optim.warmup_ratio: 0.5}
factory {warmup_ratio: null} => {optim.warmup_steps: 0, optim.warmup_ratio: null}
factory {lr_scheduler_type: null} => {optim.schedule: linear, optim.min_lr_ratio: 0.005556}
factory {max_steps: null} => {optim.schedule: cosine, optim.min_lr_ratio: 0.0}
factory {lr_scheduler_type: cosine_with_min_lr, lr_scheduler_kwargs: {min_lr: 1.0e-05}} =>
    {optim.schedule: cosine, optim.min_lr_ratio: 0.1}
factory {lr_scheduler_type: cosine_with_restarts, lr_scheduler_kwargs: {num_cycles: 3}} =>
    {optim.schedule: cosine_with_restarts, optim.restarts: 2}
factory {lr_scheduler_type: cosine_with_restarts} => {optim.schedule: cosine}
factory {max_steps: 100, lr_scheduler_type: warmup_stable_decay, lr_scheduler_kwargs:
    {num_decay_steps: 20, decay_type: linear}} => {optim.schedule: wsd, optim.decay_ratio: 0.2,
    optim.min_lr_ratio: 0.0}
factory {learning_rate: null} => {optim.lr: 5.0e-05}
factory {per_device_train_batch_size: null} => {batch.global_size: 256}
factory {disable_gradient_checkpointing: true} => {parallel.recompute: none}
factory {report_to: none} => {run.tensorboard: false}
factory {report_to: [wandb]} => {run.tensorboard: false, run.trackers: [wandb]}
factory {adapter_name_or_path: /runs/a/adapter} => {tune.init_from: /runs/a/adapter}
factory_dpo {} => {tune.objective: dpo, tune.beta: 0.1, data.seq_len: 4096, data.packing: false,
    batch.global_size: 32, optim.lr: 5.0e-06, tune.sft_weight: null, tune.gamma: null,
    tune.label_smoothing: null}
factory_dpo {pref_loss: null, pref_beta: null} => {tune.objective: dpo}
factory_dpo {pref_loss: ipo} => {tune.objective: ipo, tune.sft_weight: null, tune.gamma: null,
    tune.label_smoothing: null}
factory_dpo {pref_loss: simpo, pref_beta: null} => {tune.objective: simpo, tune.beta: 0.1,
    tune.gamma: 0.5}
factory_dpo {pref_loss: simpo, pref_beta: 2.0, simpo_gamma: 1.2} => {tune.objective: simpo,
    tune.beta: 2.0, tune.gamma: 1.2}
factory_dpo {pref_loss: orpo} => {tune.objective: orpo, tune.beta: 0.1}
factory_dpo {pref_ftx: 0.2, lora_dropout: 0.1} => {tune.sft_weight: 0.2}
factory_dpo {lora_dropout: 0.1} => {tune.dropout: null}
factory_kto {} => {tune.objective: kto, tune.undesirable_weight: 1.33, data.seq_len: 2048,
    tune.desirable_weight: null, tune.sft_weight: null, tune.gamma: null, tune.label_smoothing:
    null}
axolotl_dpo {} => {tune.objective: dpo, tune.beta: 0.3, data.seq_len: 8192, tune.dropout: null,
    data.columns: {conversation: messages, better: chosen, worse: rejected}}
axolotl_dpo {rl_beta: null} => {tune.beta: 0.1}
axolotl_dpo {rl_beta: null, dpo_beta: 0.2} => {tune.beta: 0.2}
axolotl_dpo {trl: {beta: 0.7}} => {tune.beta: 0.7}
axolotl_dpo {dpo_loss_type: ipo} => {tune.objective: ipo}
axolotl_dpo {rl: ipo} => {tune.objective: ipo, tune.sft_weight: null, tune.gamma: null,
    tune.label_smoothing: null}
axolotl_dpo {dpo_loss_type: [robust], dpo_label_smoothing: 0.1} => {tune.objective: dpo,
    tune.label_smoothing: 0.1}
axolotl_dpo {dpo_loss_type: [sigmoid, sft], dpo_loss_weights: [1.0, 0.25]} => {tune.objective:
    dpo, tune.sft_weight: 0.25}
axolotl_dpo {dpo_loss_type: [sigmoid, sft]} => {tune.sft_weight: 1.0}
axolotl_dpo {rpo_alpha: 0.5} => {tune.sft_weight: 0.5}
axolotl_dpo {rl: simpo, rl_beta: null} => {tune.objective: simpo, tune.beta: 0.1, tune.gamma: 0.5,
    tune.sft_weight: 1}
axolotl_dpo {rl: simpo, rl_beta: 2.5, simpo_gamma: 1.4, cpo_alpha: 0.0} => {tune.beta: 2.5,
    tune.gamma: 1.4, tune.sft_weight: null}
axolotl_orpo {} => {tune.objective: orpo, tune.beta: 0.1, data.path: /data/orpo.jsonl}
axolotl_kto {} => {tune.objective: kto, tune.beta: 0.5, tune.desirable_weight: 0.2,
    tune.undesirable_weight: 1.0, data.seq_len: 2048}
torchtune_dpo {} => {tune.objective: dpo, tune.beta: 0.1, data.seq_len: 2048,
    tune.label_smoothing: null, batch.global_size: 128, data.columns: {question: prompt,
    response_j: chosen, response_k: rejected}}
torchtune_dpo {loss: {_component_: torchtune.rlhf.loss.SimPOLoss}} => {tune.objective: simpo,
    tune.beta: 2.0, tune.gamma: 0.5}
torchtune_full {} => {tune.objective: dpo, tune.method: full, tune.beta: 0.05, data.columns:
    {chosen_conversations: chosen, rejected_conversations: rejected}}
factory_dpo {pref_loss: null, stage: sft, pref_beta: null} => {tune.objective: null, tune.beta:
    null, data.seq_len: 2048}
factory_dpo {packing: true} => {data.packing: false}
factory_kto {packing: true} => {data.packing: false}
factory_dpo {pref_loss: null, stage: sft, pref_beta: null, packing: true} => {data.packing: true}
"""
# What must be seen to before a run, and words of what is said about it.
STARRED = r"""
axolotl {base_model: meta-llama/Llama-3.1-8B} => base_model: hf download
axolotl {load_in_8bit: true} => load_in_8bit: qlora has 4
axolotl {adapter: llama-adapter} => adapter: tune.method
axolotl {lora_target_modules: layers\.\d+\.mlp} => lora_target_modules: patterns
axolotl {lora_target_modules: [lm_head], lora_target_linear: true} => lora_target_linear: does not
    include lm_head
axolotl {lora_target_modules: 3} => lora_target_modules: names of layers
axolotl {lora_target_modules: [q_proj, 3]} => lora_target_modules: names of layers
axolotl {lora_modules_to_save: 3} => lora_modules_to_save: names of modules
factory {additional_target: [lm_head, 3]} => additional_target: names of modules
factory {lora_target: 3} => lora_target: names of layers
torchtune {model.lora_attn_modules: [q_proj, 3]} => model.lora_attn_modules: are called
axolotl {default_system_message: You are.} => default_system_message: system message
axolotl {qat: {weight_dtype: int4}} => qat.weight_dtype: quantized or pruned
axolotl {curriculum_sampling: true} => curriculum_sampling: shuffled
axolotl {chat_template_kwargs: {enable_thinking: false}} => chat_template_kwargs.enable_thinking:
    write them into it
axolotl {my_own_key: 1} => my_own_key: hpc_tune does not know this key; python -m hpc_tune --help
    lists all settings
axolotl {lora_target_parameters: [mlp.experts.gate_up_proj]} => lora_target_parameters: both
    stacks
axolotl {lora_target_parameters: [22.mlp.experts.gate_up_proj, 22.mlp.experts.down_proj]} =>
    lora_target_parameters: all layers
axolotl {model_config: {router_aux_loss_coef: 0.01}} => model_config.router_aux_loss_coef:
    tune.router_aux_loss
axolotl {lr_scheduler: one_cycle} => lr_scheduler: cosine_with_restarts or wsd
axolotl {optimizer: muon} => optimizer: only optimizer
axolotl {val_set_size: 500, eval_steps: null} => val_set_size: share
axolotl {eval_steps: 0.1} => eval_steps: number of steps
axolotl {chat_template: chatml} => chat_template: Jinja file
axolotl {chat_template_jinja: '{{ bos_token }}'} => chat_template_jinja: into a file
axolotl {tokens: [<x>]} => tokens: no tokens are added
axolotl {special_tokens.eos_token: <x>} => special_tokens.eos_token: tokenizer's own
axolotl {plugins: [my.Plugin]} => plugins: Plugin: there are no plugins
axolotl {model_config: {rope_scaling: {factor: 2}}} => model_config.rope_scaling.factor: set
    model.rope_scaling
axolotl {unfrozen_parameters: [lm_head]} => unfrozen_parameters: frozen
axolotl {datasets: [{path: tatsu-lab/alpaca, type: alpaca}]} => datasets.0.path: --repo-type
    dataset
axolotl {datasets: [{path: tatsu-lab/alpaca, data_files: a.json}]} => datasets.0.data_files: hf
    download
axolotl {datasets: [{path: 's3://bucket/a.jsonl'}]} => datasets.0.path: name DIR in data.path
axolotl {datasets: [{path: json, data_files: a.xlsx}]} => datasets.0.data_files: JSONL or Parquet
axolotl {datasets: [{path: a.jsonl, split: 'train[:20%]'}]} => datasets.0.split:
    r[:round(len(r)*20
axolotl {datasets: [{path: a.jsonl, split: held}]} => datasets.0.split: name the file of this part
axolotl {datasets: [{path: a.jsonl, type: alpaca}]} => datasets.0.type: axolotl's words
axolotl {datasets: [{path: a.jsonl, train_on_eos: all}]} => datasets.0.train_on_eos: answers
axolotl {datasets: [{path: a.jsonl, type: input_output}]} => datasets.0.type: docs/data.md
axolotl {datasets: [{path: a.jsonl, type: pygmalion}]} => datasets.0.type: docs/data.md
axolotl {datasets: [{path: a.jsonl, type: context_qa}]} => datasets.0.type: docs/data.md
axolotl {datasets: [{path: a.jsonl, conversation: chatml}]} => datasets.0.conversation: Jinja
axolotl {datasets: [{path: a.jsonl, type: {format: 'Q: {instruction}'}}]} =>
    datasets.0.type.format: Jinja
axolotl {datasets: [{path: a.jsonl, roles_to_train: [user]}]} => datasets.0.roles_to_train: all
    text
axolotl {datasets: [{path: a.jsonl, shards: 4}]} => datasets.0.shards: r[0::4]
axolotl {datasets: [{path: a.jsonl, message_property_mappings: {role: speaker}}]} =>
    datasets.0.message_property_mappings.role: name it role or content
factory {model_name_or_path: org/name} => model_name_or_path: hub
factory {} => dataset: dataset_info.json
factory {quantization_bit: 8} => quantization_bit: 4 bits
factory {val_size: 500} => val_size: share
torchtune {tokenizer.max_seq_len: null} => tokenizer.max_seq_len: seq_len
torchtune {dataset: {_component_: torchtune.datasets.alpaca_cleaned_dataset}} =>
    dataset._component_: alpaca_cleaned_dataset
torchtune {dataset.data_files: /d/a.xlsx} => dataset.data_files: JSONL
torchtune {dataset.column_map: {a: b}} => dataset.column_map.a: columns
torchtune {checkpointer._component_: torchtune.training.FullModelMetaCheckpointer} =>
    checkpointer.checkpoint_dir: Meta's format
torchtune {loss._component_: t.MyLoss} => loss._component_: only
factory {template: mine} => template:
factory {mask_history: true} => mask_history:
factory {enable_thinking: false} => enable_thinking:
factory {label_smoothing_factor: 0.1} => label_smoothing_factor:
factory {use_galore: true} => use_galore:
factory {optim: adafactor} => optim:
factory {use_dft_loss: true} => use_dft_loss:
factory {default_system: You are.} => default_system:
factory {pissa_init: true} => pissa_init:
factory {disable_shuffling: true} => disable_shuffling:
factory {resume_from_checkpoint: saves/a} => resume_from_checkpoint:
factory {my_own_key: 3} => my_own_key:
torchtune {optimizer._component_: torch.optim.SGD} => optimizer._component_:
torchtune {tokenizer.prompt_template: t.MyTemplate} => tokenizer.prompt_template:
torchtune {dataset.new_system_prompt: You are.} => dataset.new_system_prompt:
torchtune {quantizer: {groupsize: 32}} => quantizer.groupsize:
torchtune {shuffle: false} => shuffle:
torchtune {dataset.filter_fn: mine} => dataset.filter_fn:
torchtune {my_own_key: 3} => my_own_key:
factory_dpo {dpo_label_smoothing: 0.1} => dpo_label_smoothing: cDPO
factory_dpo {pref_loss: orpo, pref_ftx: 0.5} => pref_ftx: orpo has no further
factory_kto {pref_ftx: 0.5} => pref_ftx: kto has no further
factory_dpo {ld_alpha: 0.5} => ld_alpha: in full
factory_dpo {ref_model: /models/other} => ref_model: no other
factory_dpo {ref_model_adapters: saves/sft} => ref_model_adapters: tune.init_from
factory_dpo {neftune_noise_alpha: 5} => neftune_noise_alpha: no noise
axolotl_dpo {dpo_label_smoothing: 0.1} => dpo_label_smoothing: robust DPO
axolotl_dpo {dpo_use_weighting: true} => dpo_use_weighting: alike
axolotl_dpo {dpo_norm_loss: true} => dpo_norm_loss: sums
axolotl_orpo {cpo_alpha: 0.5} => cpo_alpha: orpo has no further
axolotl_dpo {dpo_loss_type: [sigmoid, sft], dpo_loss_weights: [0.8, 0.2]} => dpo_loss_weights:
    divide all weights
axolotl_kto {} => datasets.0.type: Jinja file
torchtune_dpo {loss.label_smoothing: 0.1} => loss.label_smoothing: cDPO
torchtune_dpo {model.lora_dropout: 0.1} => model.lora_dropout: no dropout
torchtune_dpo {dataset.source: null, dataset.data_files: null} => dataset._component_: response_j
torchtune_full {ref_checkpointer.checkpoint_dir: /models/other} =>
    ref_checkpointer.checkpoint_dir: no other
"""
# What hpc_tune decides itself.
DECIDED = r"""
factory_kto {dpo_label_smoothing: 0.1} => dpo_label_smoothing: kto does not use it
factory_dpo {pref_loss: orpo, dpo_label_smoothing: 0.1} => dpo_label_smoothing: orpo does not use
    it
axolotl_dpo {excess_length_strategy: truncate} => excess_length_strategy: no answer is
axolotl_dpo {excess_length_strategy: drop} => excess_length_strategy: no answer is
axolotl_kto {excess_length_strategy: truncate} => excess_length_strategy: no answer is
axolotl_kto {excess_length_strategy: drop} => excess_length_strategy: no answer is
axolotl_dpo {datasets: [{path: /data/pairs.jsonl, roles_to_train: [user]}]} =>
    datasets.0.roles_to_train: only the answers
axolotl_dpo {datasets: [{path: /data/pairs.jsonl, train_on_eos: all}]} => datasets.0.train_on_eos:
    only the answers
axolotl {datasets: [{path: json, data_files: a.xlsx}]} => datasets.0.path:
factory {stage: pt, template: mine} => template: no template
"""
# Other trainings.
REFUSED = r"""
factory {stage: rm} => training on rewards
factory {stage: ppo} => training on rewards
factory {stage: dpo, pref_loss: hinge} => a loss on preferences with no counterpart
factory {stage: dpo, pref_loss: kto_pair} => a loss on preferences with no counterpart
factory {stage: dpo, pref_bco_weight: 0.5} => a loss on preferences with no counterpart
factory {template: qwen2_vl} => images, sound or video
factory {template: llava} => images, sound or video
factory {image_max_pixels: 262144} => images, sound or video
factory {media_dir: pictures} => images, sound or video
torchtune {loss._component_: torchtune.rlhf.loss.RSOLoss} => a loss on preferences with no
    counterpart
torchtune {loss._component_: torchtune.rlhf.loss.IPOLoss} => a loss on preferences with no
    counterpart
torchtune {loss._component_: torchtune.rlhf.loss.PPOLoss} => training on rewards
torchtune {dataset._component_: torchtune.datasets.preference_dataset} => whose loss the config
    does not name
torchtune {kd_ratio: 0.5} => distillation
torchtune {teacher_model: {_component_: t.mistral.mistral_7b}} => distillation
torchtune {model._component_: torchtune.models.llama3_2_vision.big} => images, sound or video
torchtune {dataset._component_: torchtune.datasets.multimodal.vqa_dataset} => images, sound or
    video
torchtune {model: null, policy_model: {_component_: t.mistral_7b}} => training on rewards
axolotl {rl: grpo} => training on rewards
axolotl {rl: gdpo} => training on rewards
axolotl {rl: ebft} => training on rewards
axolotl {rl: dpo, dpo_loss_type: hinge} => a loss on preferences with no counterpart
axolotl {rl: dpo, dpo_loss_type: [bco_pair]} => a loss on preferences with no counterpart
axolotl {rl: dpo, reward_model: true} => training on rewards
axolotl {datasets: [{path: a.jsonl, field_chosen: good}]} => whose loss the config does not name
axolotl {kd_trainer: true} => distillation
axolotl {plugins: [axolotl.integrations.kd.KDPlugin]} => distillation
axolotl {processor_type: AutoProcessor} => images, sound or video
axolotl {plugins: [axolotl.integrations.diffusion.DiffusionPlugin]} => diffusion
"""


def rows(table):
    """Return the rows NAME CHANGES => WHAT of a table."""
    found = []
    for row in re.sub(r"\n +", " ", table.strip()).splitlines():
        changed, _, what = row.partition(" =>")
        name, _, changes = changed.partition(" ")
        changes = {key.replace(".", "__"): v for key, v in yaml.safe_load(changes).items()}
        found.append((name, changes, what.strip()))
    return found


@pytest.mark.parametrize(("name", "changes", "expected"), rows(TAKEN))
def test_what_is_taken_over(name, changes, expected):
    came, expected = on_four_ranks(CONFIGS[name], changes), yaml.safe_load(expected)
    assert {key: came.get(key) for key in expected} == expected


@pytest.mark.parametrize(("name", "changes", "what"), rows(STARRED))
def test_what_must_be_seen_to_has_a_star_and_a_placeholder(name, changes, what):
    key, _, words = what.partition(":")
    converted = command.convert_config(theirs(CONFIGS[name], **changes), 4)
    line = line_of(converted.unsupported_keys, key)
    assert words.strip() in line
    assert line in converted.to_do
    assert f"* {line}" in command.format_report(converted, converted.to_do)
    for path in ("model.path", "data.path"):
        notes = [note for note in converted.to_do if path in note]
        assert bool(notes) or settings(converted)[path] != command.PLACEHOLDER, path


@pytest.mark.parametrize(("name", "changes", "what"), rows(DECIDED))
def test_what_is_decided_has_no_star(name, changes, what):
    key, _, words = what.partition(":")
    converted = command.convert_config(theirs(CONFIGS[name], **changes), 4)
    line = line_of(converted.ignored_keys, key)
    assert words.strip() in line
    assert line not in converted.to_do


@pytest.mark.parametrize(("name", "changes", "words"), rows(REFUSED))
def test_a_config_for_another_training_is_refused_in_one_message(
    tmp_path, capsys, name, changes, words
):
    source, out = tmp_path / "theirs.yaml", tmp_path / "ours.yaml"
    source.write_text(yaml.safe_dump(theirs(CONFIGS[name], **changes)))
    assert cli.main(["convert", str(source), "--out", str(out)]) == EXIT_USER_ERROR
    said = capsys.readouterr()
    assert said.out == ""
    assert len(said.err.splitlines()) == 1
    assert words in said.err
    assert "Stay with " in said.err
    assert not out.exists()
