"""What the settings are called in peft, the Trainer of Hugging Face, trl, torchtune, LLaMA-Factory
and axolotl, for the message about a name that is not known here.
"""

_NAMES = """
model.path           model model_name_or_path model_name base_model model_id checkpoint_dir
model.dtype          bf16 fp16 bfloat16 float16 torch_dtype
tune.objective       stage rl rl_type pref_loss loss_type rlhf_type
tune.method          finetuning_type adapter use_dora peft_use_dora load_in_4bit quantization_bit
                     use_peft train_type quantize_base
tune.rank            r lora_r lora_rank
tune.alpha           lora_alpha
tune.dropout         lora_dropout
tune.targets         target_modules lora_target lora_target_modules lora_target_linear
                     lora_attn_modules apply_lora_to_mlp apply_lora_to_output target_parameters
tune.rslora          use_rslora peft_use_rslora
tune.init_from       adapter_name_or_path lora_model_dir adapter_path adapter_checkpoint
tune.param_dtype     pure_bf16
tune.trainable_tokens trainable_token_indices
tune.neftune_alpha   neftune_noise_alpha noisy_embedding_alpha
tune.beta            pref_beta rl_beta dpo_beta kto_beta
tune.gamma           simpo_gamma cpo_gamma
data.path            train_file dataset datasets dataset_name dataset_dir train_data data_files
data.eval_path       eval_dataset test_datasets eval_file validation_file dataset_val
data.eval_fraction   val_size val_set_size test_size
data.seq_len         max_length max_seq_length max_seq_len sequence_len cutoff_len
                     model_max_length
data.packing         sample_packing neat_packing packed
data.loss_on         train_on_inputs train_on_input train_on_prompt assistant_only_loss
                     completion_only_loss masking_strategy
data.chat_template   template prompt_template
data.columns         dataset_text_field column_map
data.cache           dataset_prepared_path tokenized_path cache_dir
batch.global_size    batch_size gradient_accumulation_steps train_batch_size
batch.micro_size     micro_batch_size per_device_train_batch_size
                     train_micro_batch_size_per_gpu
optim.lr             learning_rate
optim.schedule       lr_scheduler_type lr_scheduler
optim.warmup_steps   warmup num_warmup_steps
optim.min_lr_ratio   cosine_min_lr_ratio min_lr min_lr_rate
optim.clip_norm      max_grad_norm clip_grad_norm gradient_clipping
optim.beta1          adam_beta1
optim.beta2          adam_beta2
optim.eps            adam_epsilon
optim.name           optimizer
optim.lora_b_ratio   loraplus_lr_ratio
parallel.recompute   gradient_checkpointing enable_activation_checkpointing
                     activation_checkpointing
parallel.zero_stage  deepspeed
parallel.shard       fsdp data_parallel_shard_dim
parallel.replicate   ddp data_parallel_replicate_dim
parallel.tensor      tensor_parallel_dim tensor_parallel_size tp_size
parallel.pipeline    pipeline_parallel_size pp_size
parallel.offload_params fsdp_cpu_offload
train.epochs         num_epochs num_train_epochs
train.max_steps      steps max_steps_per_epoch
train.compile        torch_compile
train.eval_every_steps eval_steps run_val_every_n_steps eval_strategy
train.stop_after_evals early_stopping_patience early_stopping_steps
train.deterministic  full_determinism
train.seed           data_seed
checkpoint.every_steps save_steps save_every_n_steps
checkpoint.keep      save_total_limit keep_last_n_checkpoints
checkpoint.keep_best load_best_model_at_end
checkpoint.resume    resume_from_checkpoint auto_resume_from_checkpoints
run.dir              output_dir
run.name             run_name wandb_name
run.trackers         report_to use_wandb wandb_project use_mlflow
run.device           use_cpu
run.timeout          ddp_timeout
"""


def _parse_names(text: str) -> dict[str, str]:
    found: dict[str, str] = {}
    ours = ""
    for line in text.splitlines():
        words = line.split()
        if words and not line.startswith(" "):
            ours, *words = words
        found |= dict.fromkeys(words, ours)
    return found


OWN_NAMES = _parse_names(_NAMES)
