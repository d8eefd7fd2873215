//! Times that a fault reported elsewhere would show in: not how fast, but that one thing costs no more than another.
//! The device must be this program's alone, so they wait for MUSE_SPARK_LAYER_TIMED=1.

use crate::capture::captured;
use crate::harness::{asked, gpu, step_key, DeviceStep, Gpu};
use crate::memory::{Banded, Scratch};
use muse_spark_layer::backend::cuda::graph::{Event, L2Flush, OwnedStream};
use muse_spark_layer::synthetic::{StepSpec, SyntheticStep};
use muse_spark_layer::{DType, LayerKind, PlanKey};
use std::cell::RefCell;

/// Decode steps append in the same launch.
const ATTENTION: [&str; 2] = ["append_attention", "attention"];
const ASK: &str = "MUSE_SPARK_LAYER_TIMED";

fn median(mut times: Vec<f64>) -> f64 {
    times.sort_by(f64::total_cmp);
    times[times.len() / 2]
}

/// Microseconds of the operations `of` in a step: events between plain launches.
fn operations(gpu: &Gpu, step: &SyntheticStep, kind: LayerKind, of: &[&str]) -> f64 {
    operations_of(gpu, step, kind, of, None)
}

/// The same where only the first `tokens` are no padding.
fn operations_of(gpu: &Gpu, step: &SyntheticStep, kind: LayerKind, of: &[&str], tokens: Option<i32>) -> f64 {
    let plan = gpu.plan(PlanKey { dependent_launch: false, ..step_key(step, kind) });
    let (mut on, mut scratch) = (DeviceStep::new(gpu, step), Scratch::new(gpu, &plan));
    let limit = tokens.map(|n| Banded::of(&gpu.device, &n.to_le_bytes()));
    on.input.num_tokens_non_padded = limit.as_ref().map(|memory| memory.view(DType::I32, &[1]));
    let own = OwnedStream::new(&gpu.device).expect("a stream");
    let flush = L2Flush::new(&own).expect("a flush");
    let times = (0..12).map(|_| {
        // Runs for longer than the host takes to queue the step behind it.
        flush.queue(&own).expect("a flush");
        let events = RefCell::new(Vec::new());
        let begin = Event::new(&gpu.device).expect("an event");
        own.record(&begin).expect("record");
        let after = |name: &'static str| {
            let event = Event::new(&gpu.device)?;
            own.record(&event)?;
            events.borrow_mut().push((name, event));
            Ok(())
        };
        gpu.cuda.profile(&plan, scratch.workspace(), &on.input, &on.output, own.stream(), &after).expect("a step");
        own.synchronize().expect("the step");
        let (events, mut last, mut sum) = (events.into_inner(), &begin, 0.0);
        for (name, event) in &events {
            if of.contains(name) {
                sum += event.microseconds_since(last).expect("a time");
            }
            last = event;
        }
        sum
    });
    median(times.collect())
}

/// Microseconds of a graph's replay.
fn replayed(gpu: &Gpu, captured_on: &SyntheticStep, step: &SyntheticStep, kind: LayerKind) -> f64 {
    let plan = gpu.plan(step_key(captured_on, kind));
    let (on, scratch) = (DeviceStep::new(gpu, captured_on), Scratch::new(gpu, &plan));
    let own = OwnedStream::new(&gpu.device).expect("a stream");
    let graph = captured(gpu, &own, plan, &scratch, &on);
    on.overwrite(step);
    let events = [(); 2].map(|_| Event::new(&gpu.device).expect("an event"));
    let flush = L2Flush::new(&own).expect("a flush");
    let times = (0..30).map(|_| {
        flush.queue(&own).expect("a flush");
        own.record(&events[0]).expect("record");
        own.replay(&graph).expect("replay");
        own.record(&events[1]).expect("record");
        events[1].microseconds_since(&events[0]).expect("a time")
    });
    median(times.collect())
}

/// One long request's verify block is split like its decode step: unsplit it would take some sixty times as long. Its
/// products are 64 rows wide and cost time of their own, so the bound is not 1.
#[test]
fn verify_attention_is_split_as_decode_is() {
    if !asked("speed::verify_attention_is_split_as_decode_is", ASK) {
        return;
    }
    let Some(gpu) = gpu("speed::verify_attention_is_split_as_decode_is") else { return };
    let time = |q_len| {
        let step = gpu.step(&StepSpec::new(1, q_len, 131_072 - q_len, LayerKind::Full), 151);
        operations(&gpu, &step, LayerKind::Full, &ATTENTION)
    };
    let (decode, verify) = (time(1), time(8));
    println!("attention at 128k: decode {decode:.1} us, verify {verify:.1} us");
    assert!(verify <= 1.45 * decode, "verify {verify:.1} us, decode {decode:.1} us");
}

/// Page size 1 costs at most 12% over 64, on 134 MB of cache.
#[test]
fn pages_of_one_token_cost_little() {
    if !asked("speed::pages_of_one_token_cost_little", ASK) {
        return;
    }
    let Some(gpu) = gpu("speed::pages_of_one_token_cost_little") else { return };
    let time = |page_size| {
        let spec = StepSpec { page_size, ..StepSpec::new(4, 1, 131_071, LayerKind::Full) };
        operations(&gpu, &gpu.step(&spec, 152), LayerKind::Full, &ATTENTION)
    };
    let (one, many) = (time(1), time(64));
    println!("attention over 134 MB: page 1 {one:.1} us, page 64 {many:.1} us");
    assert!(one <= 1.12 * many, "page 1 {one:.1} us, page 64 {many:.1} us");
}

/// The experts' time follows local routes: without any, since all tokens are padding, it is next to nothing, and a rank
/// with few is not the slower one.
#[test]
fn experts_cost_what_is_local() {
    if !asked("speed::experts_cost_what_is_local", ASK) {
        return;
    }
    let Some(gpu) = gpu("speed::experts_cost_what_is_local") else { return };
    let mut step = gpu.step(&StepSpec::new(256, 1, 16, LayerKind::Full), 153);
    let plan = gpu.plan(PlanKey { taps: muse_spark_layer::Taps::All, ..step_key(&step, LayerKind::Full) });
    let (_, output) = gpu.forward_once(&step, &plan);
    let routes = |start: i32| output.topk_ids.iter().filter(|id| (**id - start).rem_euclid(256) < 32).count();
    let starts: Vec<i32> = (0..256).collect();
    let least = *starts.iter().min_by_key(|s| routes(**s)).unwrap();
    let most = *starts.iter().max_by_key(|s| routes(**s)).unwrap();
    let mut time = |start: i32, tokens: Option<i32>| {
        step.input.local_start = start;
        operations_of(&gpu, &step, LayerKind::Full, &["w13", "w2"], tokens)
    };
    let (none, quick, slow) = (time(most, Some(0)), time(least, None), time(most, None));
    println!(
        "experts of 256 tokens: none local {none:.1} us, {} {quick:.1}, {} {slow:.1}",
        routes(least),
        routes(most)
    );
    // Of two empty launches, most is the events beside them.
    assert!(none <= 15.0, "no local route takes {none:.1} us");
    assert!(quick <= slow + 5.0, "{} routes take {quick:.1} us, {} take {slow:.1} us", routes(least), routes(most));
}

/// A graph captured 128k wide costs at most 10% more on 2k than one captured 2k wide.
#[test]
fn wide_graphs_cost_little_on_short_requests() {
    if !asked("speed::wide_graphs_cost_little_on_short_requests", ASK) {
        return;
    }
    let Some(gpu) = gpu("speed::wide_graphs_cost_little_on_short_requests") else { return };
    let kind = LayerKind::Full;
    let narrow = gpu.step(&StepSpec::new(4, 1, 2047, kind), 154);
    let mut wide = narrow.clone();
    wide.input.table_width = 131_072;
    wide.input.page_table = vec![-1; 4 * 131_072];
    for b in 0..4 {
        wide.input.page_table[b * 131_072..][..2048].copy_from_slice(&narrow.input.page_table[b * 2048..][..2048]);
    }
    let (short, long) = (replayed(&gpu, &narrow, &narrow, kind), replayed(&gpu, &wide, &wide, kind));
    println!("4 requests of 2k: captured 2k wide {short:.1} us, 128k wide {long:.1} us");
    assert!(long <= 1.1 * short, "captured 2k wide {short:.1} us, 128k wide {long:.1} us");
}
