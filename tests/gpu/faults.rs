//! What goes wrong around the layer: no memory, a context lost by this layer or by someone else, drops in any order on
//! any thread. A lost context is a process's end, so those tests run this program again as a child.

use crate::harness::{child, gpu, is_child, raw, spec, step_key, DeviceStep, Gpu};
use crate::memory::{kernel, Scratch};
use cudarc::driver::sys;
use muse_spark_layer::backend::cuda::{Buffer, Device};
use muse_spark_layer::synthetic::SyntheticStep;
use muse_spark_layer::{Backend, DType, DecoderLayer, Error, LayerKind, LayerWeights, PlanKey, Stream, Workspace};
use std::cell::Cell;

/// Allocations that cannot be had say what was wanted and what there is; the next call works, and gives the same bits.
#[test]
fn out_of_memory_is_named_and_passes() {
    let Some(gpu) = gpu("faults::out_of_memory_is_named_and_passes") else { return };
    let kind = LayerKind::Full;
    let step = gpu.step(&spec("decode-8", kind), 111);
    let (on, plan) = (DeviceStep::new(&gpu, &step), gpu.plan(step_key(&step, kind)));
    let mut scratch = Scratch::new(&gpu, &plan);
    gpu.forward(&plan, scratch.workspace(), &on, Stream::LEGACY);
    let want = on.results();
    let (free, total) = gpu.device.memory().expect("memory");
    assert!(free <= total && total > 50 << 30);
    // All that is left but 1 GiB, in pieces, since one request may be refused for its size alone.
    let mut kept: Vec<Buffer> = Vec::new();
    while gpu.device.memory().expect("memory").0 > 5 << 30 {
        kept.push(gpu.device.allocate(4 << 30).expect("what is free"));
    }
    while gpu.device.memory().expect("memory").0 > 1 << 30 {
        kept.push(gpu.device.allocate(256 << 20).expect("what is free"));
    }
    let wanted = 3u64 << 30;
    let refused = |error: Error| match &error {
        Error::OutOfMemory { device: 0, wanted, free, total } => {
            assert!(*free < 2 << 30 && *total > *wanted, "{error}");
            assert!(error.to_string().contains("is out of memory"), "{error}");
        }
        other => panic!("{other}"),
    };
    refused(gpu.device.allocate(wanted).expect_err("there is no such memory"));
    refused(gpu.cuda.workspace_of(wanted).expect_err("there is no such memory"));
    // A layer that does not fit: what it had got is freed again.
    let before = gpu.device.held();
    let weights = LayerWeights::from_host(&gpu.config, gpu.cpu.weights().tensors().view()).expect("weights");
    let layer = DecoderLayer::new(gpu.config.clone(), weights, Backend::Cuda { device: 0 });
    refused(layer.expect_err("1.6 GB do not fit into 1"));
    assert_eq!(gpu.device.held(), before);
    on.overwrite(&step);
    gpu.forward(&plan, scratch.workspace(), &on, Stream::LEGACY);
    assert!(on.results() == want, "the next call works");
    drop(kept);
    gpu.device.allocate(wanted).expect("there is memory again");
}

/// Layers, plans, workspaces and devices are dropped in any order, each on a thread of its own, and every byte is given
/// back: by the crate's count, and by the driver's of the whole device. The latter is everybody's, so another process may
/// take memory between its two readings; a leak is there each time.
#[test]
fn drops_in_any_order_on_any_thread() {
    let Some(gpu) = gpu("faults::drops_in_any_order_on_any_thread") else { return };
    let kind = LayerKind::Sliding;
    let step = gpu.step(&spec("decode-3", kind), 112);
    let free = || gpu.device.memory().expect("memory").0;
    let lost = |_| {
        let (held, before) = (gpu.device.held(), free());
        drops(&gpu, &step, kind);
        assert_eq!(gpu.device.held(), held, "bytes that buffers hold");
        before.saturating_sub(free())
    };
    let lost: Vec<u64> = (0..3).map(lost).take_while(|bytes| *bytes > 0).collect();
    assert!(lost.len() < 3, "{lost:?} bytes of device memory are not back");
}

fn drops(gpu: &Gpu, step: &SyntheticStep, kind: LayerKind) {
    for order in [[0, 1, 2, 3], [3, 2, 1, 0], [1, 3, 0, 2]] {
        let weights = LayerWeights::from_host(&gpu.config, gpu.cpu.weights().tensors().view()).expect("weights");
        let layer = DecoderLayer::new(gpu.config.clone(), weights, Backend::Cuda { device: 0 }).expect("a layer");
        let plan = layer.plan(step_key(step, kind)).expect("a plan");
        let mut workspace = layer.workspace(&plan).expect("a workspace");
        let on = DeviceStep::new(gpu, step);
        layer.forward(&plan, &mut workspace, &on.input, &on.output, Stream::LEGACY).expect("forward");
        gpu.device.synchronize().expect("the step");
        let mut parts: [Option<Box<dyn Send>>; 4] = [
            Some(Box::new(layer)),
            Some(Box::new(plan)),
            Some(Box::new(workspace)),
            Some(Box::new(Device::new(0).expect("the device"))),
        ];
        for part in order {
            let part = parts[part].take();
            std::thread::spawn(move || drop(part)).join().expect("a drop does not panic");
        }
        drop(on);
        gpu.device.synchronize().expect("the context lives");
    }
}

/// Asserts that an error is a lost context, and gives the call that it names.
#[track_caller]
fn lost<T>(result: Result<T, Error>) -> String {
    match result {
        Err(Error::ContextLost { call, .. }) => call,
        Err(other) => panic!("{other}"),
        Ok(_) => panic!("the context lives"),
    }
}

/// A step whose stream is freed while it runs: the debugging plan names the operation that reads it; then every call says that the
/// context is lost, and drops do nothing worse.
#[test]
fn a_debugging_plan_names_the_operation_that_failed() {
    let Some(_gpu) = gpu("faults::a_debugging_plan_names_the_operation_that_failed") else { return };
    let text = child("faults::child_freed_stream", &[("MUSE_SPARK_LAYER_SYNC", "1")]);
    // Steps that came as far as an operation: a whole one, and the one that failed.
    let printed = |operation: &str| text.matches(&format!("muse-spark-layer: {operation}\n")).count();
    for operation in ["qkv_gate", "attention", "attn_boundary"] {
        assert_eq!(printed(operation), 2, "{operation} is printed: {text}");
    }
    assert_eq!(printed("router"), 1, "and not those after the one that failed: {text}");
}

#[test]
#[ignore = "run as a child by a_debugging_plan_names_the_operation_that_failed"]
fn child_freed_stream() {
    if !is_child() {
        return;
    }
    let gpu = gpu("faults::child_freed_stream").expect("a GPU");
    let kind = LayerKind::Full;
    let step = gpu.step(&spec("prefill-333", kind), 115);
    let mut on = DeviceStep::new(&gpu, &step);
    let plan = gpu.plan(step_key(&step, kind));
    let mut scratch = Scratch::new(&gpu, &plan);
    // As large as the stream, so that it is mapped, and unmapped, alone.
    let stream = gpu.device.allocate(666 * 8192 * 4).expect("memory");
    on.input.stream = raw(stream.ptr(), DType::F32, &[666, 8192]);
    gpu.forward(&plan, scratch.workspace(), &on, Stream::LEGACY);
    // Freed between two operations: before the call, it would be refused by name.
    let stream = Cell::new(Some(stream));
    let forward = |gpu: &Gpu, workspace: &mut Workspace| {
        let after = |operation| {
            if operation == "o" {
                drop(stream.take());
            }
            Ok(())
        };
        gpu.cuda.profile(&plan, workspace, &on.input, &on.output, Stream::LEGACY, &after)
    };
    assert_eq!(lost(forward(&gpu, scratch.workspace())), "attn_boundary");
    lost(forward(&gpu, scratch.workspace()));
    lost(gpu.cuda.workspace_of(1 << 20));
    lost(gpu.device.allocate(1));
    gpu.cuda.plan(PlanKey::decode(1, 1)).expect("plans need no device");
    let weights = LayerWeights::from_host(&gpu.config, gpu.cpu.weights().tensors().view()).expect("weights");
    lost(DecoderLayer::new(gpu.config.clone(), weights, Backend::Cuda { device: 0 }));
}

/// A kernel of someone else that fails: what the layer's next calls say.
#[test]
fn a_context_lost_by_someone_else_is_named() {
    let Some(_gpu) = gpu("faults::a_context_lost_by_someone_else_is_named") else { return };
    child("faults::child_trap", &[]);
}

#[test]
#[ignore = "run as a child by a_context_lost_by_someone_else_is_named"]
fn child_trap() {
    if !is_child() {
        return;
    }
    let device = Device::new(0).expect("a GPU");
    let buffer = device.allocate(64).expect("memory");
    let ptx = c".version 7.8\n.target sm_90\n.address_size 64\n.visible .entry fail() { trap; }\n";
    let kernel = kernel(&device, ptx, c"fail");
    {
        let _current = device.make_current().expect("a context");
        let none: *mut std::ffi::c_void = std::ptr::null_mut();
        // SAFETY: a kernel without arguments.
        unsafe { sys::cuLaunchKernel(kernel, 1, 1, 1, 1, 1, 1, 0, none.cast(), none.cast(), none.cast()) };
    }
    lost(device.synchronize());
    lost(device.allocate(64));
    lost(buffer.write(&[0; 64]));
    let text = device.synchronize().expect_err("lost").to_string();
    assert!(text.contains("Start a new process"), "{text}");
    drop(buffer);
}
