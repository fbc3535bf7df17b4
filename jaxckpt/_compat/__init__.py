"""The only place that uses private parts of JAX or Flax, or asks for a version. Each entry says why.

Supported: jax 0.10.2 (the newest for Python 3.11) and later; developed against 0.10.2 and 0.12.0.1.

`needs` is the table of the private parts. It is checked against the installed JAX before anything else here is
imported. So if JAX lacks a part, there is one error, which names it. Checks that need a trace run at first use, in
`primitives` and `names`. The other files are by theme: `jaxprs` (programs), `traces` (what is being traced), `names`
(names, checkpoints, policies), `rules` (operations that jaxckpt defines), `targets` (backends and devices), `compiler`
(XLA). `flax` is imported only with Flax.
"""

# ruff: noqa: F401 (other files import them from here)

from jaxckpt._compat import needs  # the probe must be first
from jaxckpt._compat.compiler import (
    COPIES_BRANCHES,
    CPU_WIDENS_BFLOAT16_LOOPS,
    UNKNOWN_CALL,
    UNTILED,
    CompileError,
    CompileRequest,
    checkpoint_options,
    compile_request,
    dump_options,
    is_out_of_memory,
    is_stopped,
    lowered_devices,
    memory_stats,
    no_persistent_cache,
    own_options,
    refused_option,
    stopping_options,
    triton_free_options,
    unknown_option,
    untuned_options,
)
from jaxckpt._compat.jaxprs import (
    DropVar,
    Literal,
    Var,
    allowed_in_custom_rules,
    at_line_of,
    build_jaxpr,
    call_path,
    close_jaxpr,
    equation_name,
    equation_params,
    eval_jaxpr,
    expansion,
    fresh_var,
    held_jaxprs,
    is_jaxpr,
    is_own_file,
    is_unspecified,
    jaxpr_consts,
    jaxpr_file,
    jaxpr_title,
    jvp_jaxpr,
    like,
    mapped_as,
    mapped_devices,
    mapped_sizes,
    name_stack,
    num_scan_consts_carry,
    open_jaxpr,
    prepend_name_stack,
    primitive_name,
    remat_disallowed_effects,
    replace_params,
    rewritten,
    run_mapped,
    side_effects,
    source_line,
    spec_of_parts,
)
from jaxckpt._compat.kernels import removable
from jaxckpt._compat.loops import waiting, waits
from jaxckpt._compat.lowering import (
    is_constant,
    lower_fun,
    lower_with,
    register_lowering,
    values_at_barrier,
)
from jaxckpt._compat.names import (
    ask_policy,
    everything_saveable,
    keep_names,
    kept_equations,
    name_equation,
    working_checkpoints,
)
from jaxckpt._compat.primitives import (
    check_primitives,
    jit_settings,
    primitive_names,
)
from jaxckpt._compat.rules import (
    CustomRule,
    Primitive,
    Zero,
    batched_reverse_rule,
    batching_rules,
    broadcast,
    closed_over_error,
    custom_rule,
    drop_unused,
    instantiate_zeros,
    jvp_rules,
    pull_back,
    tangent_program,
    transpose_rules,
    with_changed_rules,
    without_unused,
    zeros_like_aval,
)
from jaxckpt._compat.targets import (
    cuda_plugin,
    cuda_topology,
    start_within,
    tpu_topology,
)
from jaxckpt._compat.traces import (
    MERGES_SHARDED,
    SCANS_KEEP_RULES,
    Mapped,
    Tracer,
    alone,
    blank_keys,
    cache_in_context,
    clean_trace,
    cotangent_aval,
    create_device_mesh,
    differentiates_loop,
    explicit_sharding,
    is_linearized,
    is_on_host,
    is_ref,
    is_ref_type,
    is_tracer,
    jit_is_disabled,
    key_implementation,
    loop_body,
    manual_axes,
    mapped_here,
    may_be_of_sharding,
    shaped_array,
    tangent_aval,
    trace_context,
    trace_state,
    typed,
    unmapped_aval,
    usual_promotion,
    varying_axes,
    weakref_lru_cache,
    within_named_axes,
)

JAX_VERSION = needs.VERSION
