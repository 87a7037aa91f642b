"""The keys of axolotl that give no setting: what hpc_tune decides itself, and what it lacks."""

from hpc_tune.convert.outcomes import (
    LAYOUT,
    NO_TRACKER,
    Ignored,
    Rule,
    Unsupported,
    each,
    lacking,
)
from hpc_tune.convert.trainer import (
    NF4,
    ONE_SCHEDULE,
    ROUTER_LOSS,
    only_value,
    schedule_arguments,
)

_PREPARED = "raw data are prepared once, into data.cache; ranks read ahead of their steps"
_OWN = Ignored("attention and loss are PyTorch's own; logits are never held whole")
IGNORED_KEYS: dict[str, Rule] = {
    "quantize_moe_experts": Ignored("tune.method=qlora keeps routed experts in 4 bits too"),
    **each(
        Ignored("padding is neither attended to nor learned"),
        "special_tokens.pad_token tokens.pad_token",
    ),
    **each(
        Ignored("model and tokenizer are read from model.path; config.json says their type"),
        "model_type type_of_model tokenizer_type tokenizer_use_fast tokenizer_legacy "
        "tokenizer_use_mistral_common tokenizer_save_jinja_files base_model_config "
        "cls_model_config base_model_ignore_patterns is_falcon_derived_model "
        "is_llama_derived_model is_mistral_derived_model is_qwen_derived_model save_safetensors",
    ),
    **each(
        Ignored("ranks read their regions of the files"),
        "low_cpu_mem_usage lora_on_cpu qlora_sharded_model_loading device_map device_map.* "
        "experimental_skip_move_to_device",
    ),
    **each(
        Ignored(_PREPARED),
        "dataset_processes dataset_num_proc dataset_keep_in_memory skip_prepare_dataset "
        "num_dataset_shards_to_save dataloader_pin_memory dataloader_num_workers "
        "dataloader_prefetch_factor dataloader_drop_last group_by_length streaming "
        "streaming_multipack_buffer_size pretrain_multipack_buffer_size remove_unused_columns "
        "preprocess_iterable is_preprocess",
    ),
    **each(
        Ignored("rows have data.seq_len tokens, packed by the data's order and train.seed"),
        "eval_sample_packing pad_to_sequence_len pad_to_multiple_of sample_packing_group_size "
        "sample_packing_bin_size sample_packing_mp_start_method sample_packing_eff_est "
        "multipack_real_batches batch_flattening total_num_tokens total_supervised_tokens "
        "pretrain_multipack_attn pretraining_sample_concatenation",
    ),
    **each(Ignored("the micro-batch is the largest that fits"), "eval_batch_size"),
    "auto_find_batch_size": Ignored("the micro-batch is the largest that fits"),
    **each(
        _OWN,
        "flash_attention sdp_attention xformers_attention flex_attention eager_attention "
        "sage_attention attn_implementation attention flex_attn_compile_kwargs.* flash_optimum "
        "flash_attn_cross_entropy flash_attn_rms_norm flash_attn_fuse_qkv flash_attn_fuse_mlp "
        "gemma4_hybrid_attn_impl unsloth_cross_entropy_loss unsloth_lora_mlp unsloth_lora_qkv "
        "unsloth_lora_o unsloth_rms_norm unsloth_rope lora_mlp_kernel lora_qkv_kernel "
        "lora_o_kernel lora_embedding_kernel liger_rope liger_rms_norm liger_layer_norm "
        "liger_swiglu liger_glu_activation liger_cross_entropy liger_fused_linear_cross_entropy "
        "liger_use_token_scaling liger_rms_norm_gated fused_attn_kernel cut_cross_entropy "
        "chunked_cross_entropy chunked_cross_entropy_num_chunks use_kernels experts_implementation "
        "use_scattermoe use_sonicmoe tiled_mlp tiled_mlp_num_shards tiled_mlp_use_original_mlp",
    ),
    **each(
        Ignored(LAYOUT),
        "fsdp fsdp.* fsdp_config fsdp_config.* fsdp_version fsdp_final_state_dict_type ddp "
        "expert_parallel_size dp_shard_size dp_replicate_size tensor_parallel_size "
        "ddp_bucket_cap_mb ddp_broadcast_buffers ddp_find_unused_parameters accelerator_config.*",
    ),
    **each(Ignored("run.timeout and run.host_timeout end a job that hangs"), "ddp_timeout"),
    **each(
        Ignored("mpirun, srun or torchrun start the ranks"),
        "world_size local_rank use_ray ray_run_name ray_num_workers resources_per_worker "
        "resources_per_worker.*",
    ),
    "device": Ignored("run.device=auto takes the GPU if there is one"),
    **each(
        Ignored("the governor acts before memory ends; memory.host_limit limits the host"),
        "gpu_memory_limit max_memory.* gc_steps",
    ),
    **each(
        Ignored("metrics.jsonl in run.dir has each step, with tokens per second and memory"),
        "logging_steps include_tokens_per_second include_tkps debug profiler_steps_start",
    ),
    **each(
        Ignored("the run is one, however often it starts; WANDB_PROJECT is in the environment"),
        "wandb_mode wandb_entity wandb_run_id wandb_watch",
    ),
    **each(
        Ignored("checkpoints go by time and steps, not by epochs; the last weights are saved"),
        "save_only_model save_first_step saves_per_epoch dynamic_checkpoint.*",
    ),
    **each(
        Ignored("held-out loss is measured at the start and the end; train.eval_every_steps"),
        "eval_strategy evaluation_strategy eval_sequence_len",
    ),
    "auto_resume_from_checkpoints": Ignored("checkpoint.resume=auto: rerun the same command"),
    **each(
        Ignored("python -m hpc_tune export --to merged merges an adapter"),
        "merge_lora merge_method",
    ),
    **each(
        Ignored("recomputing is PyTorch's own, not reentrant"), "gradient_checkpointing_kwargs.*"
    ),
    **each(Ignored("one decoder block is compiled, for all"), "torch_compile_backend"),
    "torch_compile_mode": Ignored("one decoder block is compiled, for all"),
    **schedule_arguments(
        "num_cycles num_decay_steps min_lr_ratio warmup_type decay_type",
        "optim.schedule, optim.restarts and optim.decay_ratio say it",
    ),
    **each(
        Ignored("optim.min_lr_ratio says it"),
        "cosine_min_lr_ratio lr_scheduler_kwargs.min_lr_rate",
    ),
    "peft.backend": Ignored("bitsandbytes quantizes"),
    "peft_autocast_adapter_dtype": only_value(
        "true", "adapters are in fp32; tune.param_dtype says it"
    ),
    "lora_fan_in_fan_out": Ignored("found by the kind of a layer"),
    "loraplus_lr_embedding": Ignored("embeddings have no adapters"),
    "strict": Ignored("a key that is not known is an error"),
    "axolotl_config_path": Ignored("run.dir has the resolved configuration"),
    "shuffle_before_merging_datasets": Ignored("rows of all data are shuffled, by train.seed"),
    "peft_init_lora_weights": only_value("true", "adapters are initialized as in LoRA"),
    "bnb_config_kwargs.bnb_4bit_quant_type": only_value("nf4", NF4),
    "bnb_config_kwargs.bnb_4bit_use_double_quant": only_value("true", NF4),
    "shuffle_merged_datasets": only_value("true", "rows are always shuffled, by train.seed"),
}
_SHAPE = "the model is what config.json of model.path says: change it there"
UNSUPPORTED_KEYS: dict[str, Rule] = {
    "load_in_8bit": lacking("there are no 8 bits: lora on bf16 is used; qlora has 4", to_do=True),
    "gptq": lacking("tune.method=qlora quantizes a model by itself: name that", to_do=True),
    **each(lacking(NF4), "bnb_config_kwargs.* peft.group_size"),
    **each(
        lacking("model.dtype is bf16 or fp32; auto takes bf16 on a GPU that has it"), "fp16 float16"
    ),
    "float32": lacking("set model.dtype=fp32", to_do=True),
    "fp8_enable_fsdp_float8_all_gather": lacking("weights are gathered in model.dtype"),
    **each(
        lacking("all linear layers named in tune.targets get adapters", to_do=True),
        "peft_layers_to_transform peft_layers_pattern",
    ),
    **each(
        lacking("adapters begin and are trained as in LoRA, with B at 0", to_do=True),
        "peft.loftq_config.* relora relora_steps relora_warmup_steps "
        "relora_anneal_steps relora_prune_ratio relora_prune_method relora_cpu_offload "
        "jagged_restart_steps jagged_restart_warmup_steps jagged_restart_anneal_steps "
        "peft_ensure_weight_tying",
    ),
    **each(
        lacking("no parts are frozen: adapters are trained, or all weights", to_do=True),
        "unfrozen_parameters lisa_n_layers lisa_step_interval "
        "spectrum_top_fraction spectrum_model_name",
    ),
    "lisa_layers_attribute": Ignored("no parts are frozen"),
    **each(
        ROUTER_LOSS,
        "model_config.router_aux_loss_coef overrides_of_model_config.router_aux_loss_coef",
    ),
    **each(
        Ignored("a loss of routers is learned where tune.router_aux_loss is set"),
        "model_config.output_router_logits overrides_of_model_config.output_router_logits",
    ),
    **each(
        lacking(_SHAPE, to_do=True),
        "overrides_of_model_config.* model_config.* rope_scaling peft_layer_replication "
        "reinit_weights random_init_weights scaling_softmax scaling_softmax_factor "
        "scaling_softmax_bias s2_attention llama4_linearized_experts use_pose "
        "pose_split_on_token_ids pose_max_context_len pose_num_chunks",
    ),
    **each(
        lacking("the model is loaded as model.dtype says"),
        "torch_dtype overrides_of_model_kwargs.* model_kwargs.* model_quantization_config "
        "model_quantization_config_kwargs.* embeddings_skip_upcast",
    ),
    **each(
        lacking(
            "no tokens are added; save the model and its tokenizer with them first", to_do=True
        ),
        "tokens added_tokens_overrides special_tokens.additional_special_tokens "
        "fix_untrained_tokens",
    ),
    **each(
        lacking("the tokenizer's own is taken: if that is another, change it there", to_do=True),
        "special_tokens.bos_token special_tokens.eos_token special_tokens.unk_token "
        "tokens.bos_token tokens.eos_token tokens.unk_token",
    ),
    **each(
        lacking("embeddings keep their size"),
        "resize_token_embeddings_to_32x mean_resizing_embeddings shrink_embeddings",
    ),
    "tokenizer_config": lacking("put that tokenizer's files into model.path", to_do=True),
    **each(
        lacking("name the directory of that revision in model.path", to_do=True),
        "revision_of_model model_revision",
    ),
    "trust_remote_code": lacking("no code of a model directory is run: its type must be known"),
    # false is an argument too: of Qwen3's enable_thinking it is not what a template does without.
    "chat_template_kwargs.*": Unsupported(
        "a template has no further arguments: write them into it", to_do=True
    ),
    "eot_tokens": lacking("what the chat template writes to end an answer is learned with it"),
    "default_system_message": lacking(
        "begin each record's messages with a system message", to_do=True
    ),
    **each(lacking("cut the data beforehand", to_do=True), "dataset_shard_num dataset_shard_idx"),
    **each(
        lacking("prepare the data so beforehand", to_do=True),
        "dataset_exact_deduplication min_sample_len",
    ),
    **each(
        lacking("rows are always shuffled, by train.seed", to_do=True),
        "curriculum_sampling sample_packing_sequentially",
    ),
    **each(
        lacking("there is no context parallelism; parallel.recompute=full makes long rows fit"),
        "context_parallel_size sequence_parallel_degree heads_k_stride ring_attn_func",
    ),
    **each(
        lacking("parallel.recompute=full saves that memory"),
        "activation_offloading layer_offloading",
    ),
    "deepcompile": lacking("set train.compile=true"),
    **each(
        lacking("there is one learning rate for all weights", to_do=True),
        "embedding_lr embedding_lr_scale lr_groups",
    ),
    **each(
        lacking("AdamW is the only optimizer; find optim.lr again", to_do=True),
        "optim_args optim_args.* optim_target_modules torchdistx_path adam_beta3 adam_epsilon2 "
        "dion_lr dion_momentum dion_rank_fraction dion_rank_multiple_of grokfast_alpha "
        "grokfast_lamb",
    ),
    **each(
        lacking(ONE_SCHEDULE, to_do=True),
        "lr_scheduler_kwargs.* lr_quadratic_warmup cosine_constant_lr_ratio lr_div_factor",
    ),
    **each(
        lacking("cross entropy of the next token is the only loss", to_do=True),
        "use_eaft label_smoothing_factor",
    ),
    **each(Ignored("cross entropy is the only loss"), "eaft_alpha eaft_k"),
    **each(
        Ignored("distillation alone uses it"),
        "kd_trainer kd_ce_alpha kd_alpha kd_temperature kd_beta kd_normalize_topk",
    ),
    "trainer_cls": lacking("there is one loop of training", to_do=True),
    "diffusion.*": Ignored("training by diffusion alone uses it"),
    **each(
        lacking("nothing is quantized or pruned in training, but the base by qlora", to_do=True),
        "qat.* quantization.* llmcompressor.*",
    ),
    **each(
        lacking("a loss that is not finite ends a run; watch and the report show the others"),
        "loss_watchdog_threshold loss_watchdog_patience",
    ),
    "load_best_model_at_end": lacking("set checkpoint.keep_best=true, and export that", to_do=True),
    **each(
        Ignored("checkpoint.keep_best takes the loss"), "metric_for_best_model greater_is_better"
    ),
    "evals_per_epoch": lacking("evaluations go by steps: set train.eval_every_steps"),
    "resume_from_checkpoint": lacking(
        "their state cannot be read; tune.init_from takes adapters", to_do=True
    ),
    **each(
        lacking("the held-out loss is what is measured; generate and lm-eval come afterwards"),
        "eval_table_size eval_max_new_tokens do_causal_lm_eval eval_causal_lm_metrics "
        "do_bench_eval bench_dataset bench_split generate_samples lm_eval_tasks "
        "lm_eval_batch_size lm_eval_model",
    ),
    **each(
        Ignored("python -m hpc_tune generate answers prompts"),
        "num_generation_samples generation_max_new_tokens generation_temperature "
        "generation_top_p generation_top_k generation_prompt_ratio generation_do_sample "
        "gradio_title gradio_share gradio_server_name gradio_server_port gradio_max_new_tokens "
        "gradio_temperature",
    ),
    **each(
        lacking(NO_TRACKER),
        "mlflow_tracking_uri mlflow_experiment_name mlflow_run_name "
        "hf_mlflow_log_artifacts use_comet comet_api_key comet_workspace comet_project_name "
        "comet_experiment_key comet_mode comet_online comet_experiment_config.* "
        "trackio_project_name trackio_run_name trackio_space_id use_otel_metrics "
        "otel_metrics_host otel_metrics_port use_swanlab swanlab_project swanlab_mode "
        "swanlab_workspace swanlab_experiment_name swanlab_description swanlab_log_completions "
        "swanlab_log_model swanlab_completion_log_interval swanlab_completion_max_buffer "
        "wandb_log_model",
    ),
    **each(
        lacking("nothing is uploaded; run.dir has export/"),
        "hub_model_id hub_strategy hub_revision push_dataset_to_hub hf_use_auth_token",
    ),
    **each(
        Ignored("images, sound and video are not trained on"),
        "image_size image_resize_algorithm freeze_mm_modules processor_type is_multimodal",
    ),
    "max_packed_sequence_len": lacking("set data.packing=true", to_do=True),
}
