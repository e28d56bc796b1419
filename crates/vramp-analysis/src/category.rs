//! What a block is for: parameter, gradient, activation and so on.
//!
//! A category that the recording names takes precedence. Few recordings do, so it follows from rules,
//! in this order. The first that applies counts.
//!
//! | category | a block whose stack or life shows |
//! |---|---|
//! | KV cache | a frame of a key-value cache (`cache_utils.py`, `kv_cache`, ...) |
//! | optimizer state | a frame of an optimizer or a recorded optimizer step; the block outlives the step |
//! | workspace | the same, but freed within the step; a frame of cuBLAS's or cuDNN's workspace |
//! | input | a frame of a data loader |
//! | activation | a frame of `forward`, also when it runs again inside a backward pass |
//! | gradient | a frame of a backward pass |
//! | parameter | a frame that builds, loads, moves or converts a module, outside of `forward` |
//! | gradient | no stack; it lives through a recorded optimizer step and ends with `zero_grad` |
//! | activation | no stack; allocated between two recorded optimizer steps and freed before the second |
//! | parameter | no stack; allocated before the first recorded optimizer step, and outlives the last |
//! | unknown | none of these |

use std::fmt;

use serde::Serialize;
use vramp_trace::{Frame, StackId, Stacks, Trace, Workload};

use crate::blocks::{Block, Blocks, NEVER};
use crate::steps::Annotated;

/// What a block is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Category {
    /// Weights of a module.
    Parameter,
    /// Gradients.
    Gradient,
    /// State of an optimizer.
    OptimizerState,
    /// Results of a forward pass.
    Activation,
    /// Keys and values of attention, kept between steps.
    KvCache,
    /// Scratch memory of an operation.
    Workspace,
    /// Batches of a data loader.
    Input,
    /// No rule applies.
    Unknown,
}

impl Category {
    /// Every category.
    pub const ALL: [Category; 8] = [
        Category::Parameter,
        Category::Gradient,
        Category::OptimizerState,
        Category::Activation,
        Category::KvCache,
        Category::Workspace,
        Category::Input,
        Category::Unknown,
    ];

    /// Returns its name for a person.
    pub fn name(self) -> &'static str {
        match self {
            Category::Parameter => "parameter",
            Category::Gradient => "gradient",
            Category::OptimizerState => "optimizer state",
            Category::Activation => "activation",
            Category::KvCache => "KV cache",
            Category::Workspace => "workspace",
            Category::Input => "input",
            Category::Unknown => "unknown",
        }
    }

    /// Returns the category that a recording names, such as `OPTIMIZER_STATE` or `kv_cache`.
    pub fn parse(name: &str) -> Option<Category> {
        let plain: String = name.chars().filter(char::is_ascii_alphanumeric).collect();
        Some(match plain.to_ascii_lowercase().as_str() {
            "parameter" | "parameters" | "param" | "weights" | "weight" => Category::Parameter,
            "gradient" | "gradients" | "grad" => Category::Gradient,
            "optimizerstate" | "optimizer" | "optstate" => Category::OptimizerState,
            "activation" | "activations" => Category::Activation,
            "kvcache" | "kv" => Category::KvCache,
            "workspace" | "temporary" | "temp" | "autograddetail" => Category::Workspace,
            "input" | "inputs" => Category::Input,
            _ => return None,
        })
    }
}

impl fmt::Display for Category {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

/// Returns the category of every block of `workload`, which was made from `trace`, by number.
/// O(frames of all stacks + blocks log spans).
pub fn categories(
    trace: &Trace,
    workload: &Workload,
    blocks: &Blocks,
    annotated: &Annotated,
) -> Vec<Category> {
    categories_by_roles(trace, workload, blocks, annotated, &Roles::of(&trace.stacks))
}

/// What each stack of a trace says about the blocks it allocates.
pub(crate) struct Roles(Vec<Role>);

impl Roles {
    /// Reads every stack. O(frames of all stacks).
    pub(crate) fn of(stacks: &Stacks) -> Roles {
        let role_of =
            |index| StackId::from_index(index).map_or(Role::None, |id| role(stacks.frames(id)));
        Roles((0..stacks.len()).map(role_of).collect())
    }
}

/// As [`categories`], with the roles of the trace's stacks. O(blocks log spans).
pub(crate) fn categories_by_roles(
    trace: &Trace,
    workload: &Workload,
    blocks: &Blocks,
    annotated: &Annotated,
    Roles(roles): &Roles,
) -> Vec<Category> {
    blocks
        .iter()
        .map(|(number, block)| {
            let label = workload.label_of(&trace.labels, number);
            if let Some(recorded) = Category::parse(label.category) {
                return recorded;
            }
            let role = block.stack.and_then(|id| roles.get(id.index()).copied());
            category(block, role.unwrap_or(Role::None), annotated)
        })
        .collect()
}

/// What a stack says about the blocks it allocates.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Role {
    KvCache,
    Optimizer,
    Input,
    Workspace,
    Forward,
    Backward,
    Module,
    None,
}

fn role<'a>(frames: impl Iterator<Item = Frame<'a>>) -> Role {
    let mut role = Role::None;
    // From the innermost frame outwards.
    for frame in frames {
        match role_of_frame(&frame) {
            found @ (Role::KvCache | Role::Optimizer | Role::Input | Role::Workspace) => {
                return found;
            }
            // A forward pass inside a backward pass recomputes activations.
            Role::Backward if role == Role::Forward => {}
            // A module is built, but inside of this a forward pass runs.
            Role::Module if role != Role::None => {}
            Role::None => {}
            found if role == Role::None || found == Role::Forward && role == Role::Module => {
                role = found;
            }
            _ => {}
        }
    }
    role
}

fn role_of_frame(frame: &Frame<'_>) -> Role {
    let (file, name) = (frame.filename, frame.name);
    let in_file = |parts: &[&str]| parts.iter().any(|part| file.contains(part));
    let in_name = |parts: &[&str]| parts.iter().any(|part| name.contains(part));
    let is = |names: &[&str]| names.contains(&name);
    if in_file(&["cache_utils.py", "kv_cache", "kvcache", "cache_engine", "mem_cache/"])
        || in_name(&["kv_cache", "KVCache", "KvCache", "past_key_value"])
    {
        return Role::KvCache;
    }
    let optimizer = in_file(&["/optim/", "optimizer", "/optimizers/"]);
    if optimizer && (in_name(&["step", "init_group", "init_state", "adam", "sgd"])) {
        return Role::Optimizer;
    }
    if in_file(&["/utils/data/", "dataloader", "data_loader"]) || is(&["collate_fn"]) {
        return Role::Input;
    }
    if in_name(&["CUDABlasWorkspace", "BlasLtWorkspace", "cublasSetWorkspace", "cudnn::Workspace"])
    {
        return Role::Workspace;
    }
    if is(&["forward", "_conv_forward", "_forward_impl", "forward_impl"]) {
        return Role::Forward;
    }
    if in_name(&["autograd::Engine", "AccumulateGrad", "_engine_run_backward"])
        || name == "backward"
        || in_file(&["/autograd/"]) && is(&["_make_grads", "grad"])
    {
        return Role::Backward;
    }
    let in_module = in_file(&["nn/modules/", "nn/init.py", "nn/parameter.py"]);
    let builds = is(&["_apply", "convert", "to", "cuda", "__init__", "reset_parameters"])
        || in_name(&["to_empty", "kaiming", "xavier"]);
    let loads = in_name(&["from_pretrained", "load_state_dict", "load_weights", "load_model"]);
    if loads || in_module && builds {
        return Role::Module;
    }
    Role::None
}

fn category(block: &Block, role: Role, annotated: &Annotated) -> Category {
    let step = Annotated::find(&annotated.optimizer_steps, block.alloc);
    match role {
        Role::KvCache => Category::KvCache,
        Role::Input => Category::Input,
        Role::Workspace => Category::Workspace,
        Role::Forward => Category::Activation,
        Role::Module => Category::Parameter,
        Role::Optimizer => {
            let temporary = match step {
                Some(step) => block.free <= step.end,
                None => block.free != NEVER,
            };
            if temporary { Category::Workspace } else { Category::OptimizerState }
        }
        Role::Backward => Category::Gradient,
        Role::None => by_life(block, annotated),
    }
}

/// Returns the category that follows from the recorded optimizer steps alone.
fn by_life(block: &Block, annotated: &Annotated) -> Category {
    let steps = &annotated.optimizer_steps;
    if let Some(step) = Annotated::find(steps, block.alloc) {
        let temporary = block.free <= step.end;
        return if temporary { Category::Workspace } else { Category::OptimizerState };
    }
    let Some(next) = Annotated::next(steps, block.alloc) else { return Category::Unknown };
    if block.free <= next.begin {
        // Before the first step, a model is built too.
        let first = steps.first().is_some_and(|first| first.begin >= next.begin);
        return if first { Category::Unknown } else { Category::Activation };
    }
    if Annotated::find(&annotated.zero_grads, block.free).is_some() {
        return Category::Gradient;
    }
    let before_all = steps.first().is_some_and(|first| block.alloc < first.begin);
    let after_all = steps.last().is_some_and(|last| block.free >= last.end);
    if before_all && after_all { Category::Parameter } else { Category::Unknown }
}

#[cfg(test)]
mod tests {
    use vramp_trace::{Label, Stacks};

    use super::*;
    use crate::steps::Span;
    use crate::testing::{alloc, alloc_by, free, trace};

    const TORCH: &str = "/v/site-packages/torch/";

    fn of(frames: &[(&str, &str)]) -> Role {
        role(frames.iter().map(|&(filename, name)| Frame { name, filename, line: 1 }))
    }

    #[test]
    fn a_stack_shows_what_its_blocks_are_for() {
        let module = &format!("{TORCH}nn/modules/module.py");
        let linear = &format!("{TORCH}nn/modules/linear.py");
        let autograd = &format!("{TORCH}autograd/graph.py");
        let adam = &format!("{TORCH}optim/adamw.py");
        let cache = "/v/site-packages/transformers/cache_utils.py";
        let train = ("train.py", "main");
        for (frames, role) in [
            (vec![(&**linear, "forward"), (&**module, "_call_impl"), train], Role::Forward),
            (vec![(&**autograd, "_engine_run_backward"), train], Role::Backward),
            (vec![(&**linear, "forward"), (&**autograd, "_engine_run_backward")], Role::Forward),
            (vec![(&**module, "convert"), (&**module, "_apply"), train], Role::Module),
            (vec![(&**linear, "__init__"), train], Role::Module),
            (vec![(&**adam, "_init_group"), (&**adam, "step"), train], Role::Optimizer),
            (vec![(cache, "update"), (&**linear, "forward")], Role::KvCache),
            (vec![train], Role::None),
            (vec![], Role::None),
        ] {
            assert_eq!(of(&frames), role, "{frames:?}");
        }
    }

    #[test]
    fn state_outlives_the_optimizer_step_and_workspace_does_not() {
        let mut stacks = Stacks::default();
        let filename = "/v/site-packages/torch/optim/adamw.py";
        let step = stacks.add([Frame { name: "step", filename, line: 9 }]);
        let mut trace = trace(&[alloc_by(step, 1, 8), alloc_by(step, 2, 8), free(2)]);
        trace.stacks = stacks;
        let workload = Workload::from_trace(&trace, 0);
        let blocks = Blocks::of(&workload);
        let found = categories(&trace, &workload, &blocks, &Annotated::default());
        assert_eq!(found, [Category::OptimizerState, Category::Workspace]);
    }

    #[test]
    fn without_stacks_the_life_of_a_block_counts() {
        // 1: alive from before the first step. 2: gradient. 3: activation of the second step.
        let events = [
            alloc(1, 8),
            alloc(2, 8), // 1
            alloc(4, 8), // 2: in the first step
            free(2),     // 3: zero_grad
            alloc(3, 8), // 4
            free(3),     // 5
            alloc(5, 8), // 6: in the second step
            free(5),     // 7
        ];
        let trace = trace(&events);
        let workload = Workload::from_trace(&trace, 0);
        let blocks = Blocks::of(&workload);
        let annotated = Annotated {
            optimizer_steps: vec![Span { begin: 2, end: 3 }, Span { begin: 6, end: 8 }],
            zero_grads: vec![Span { begin: 3, end: 4 }],
            ..Annotated::default()
        };
        let found = categories(&trace, &workload, &blocks, &annotated);
        use Category::{Activation, Gradient, OptimizerState, Parameter, Workspace};
        assert_eq!(found, [Parameter, Gradient, OptimizerState, Activation, Workspace]);
    }

    #[test]
    fn a_recorded_category_takes_precedence() {
        let mut trace = trace(&[alloc(1, 8), alloc(2, 8)]);
        trace.labels.label_event(1, Label { category: "KV_CACHE", ..Label::default() });
        let workload = Workload::from_trace(&trace, 0);
        let blocks = Blocks::of(&workload);
        let found = categories(&trace, &workload, &blocks, &Annotated::default());
        assert_eq!(found, [Category::Unknown, Category::KvCache]);
    }

    #[test]
    fn recorded_names_are_understood_in_any_spelling() {
        for name in ["OPTIMIZER_STATE", "optimizer state", "OptimizerState"] {
            assert_eq!(Category::parse(name), Some(Category::OptimizerState));
        }
        assert!(Category::ALL.iter().take(7).all(|&it| Category::parse(it.name()) == Some(it)));
        assert_eq!(Category::parse("banana"), None);
    }
}
