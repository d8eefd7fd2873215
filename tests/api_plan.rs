//! Plans: limits by name, printing, and that they survive serialisation.

use muse_spark_layer::plan::{MAX_REQUESTS, MAX_TOKENS};
use muse_spark_layer::{AttentionEngine, LayerKind, Plan, PlanKey, QueryPrecision, ShortRequests, WeightKind};
use rstest::rstest;

fn plan(key: PlanKey) -> Plan {
    Plan::new(key, WeightKind::Nvfp4, 132).unwrap()
}

#[rstest]
#[case(PlanKey { tokens: MAX_TOKENS + 1, ..PlanKey::decode(8, 64) }, "tokens: 32769 is past the limit of 32768")]
#[case(PlanKey { requests: MAX_REQUESTS + 1, ..PlanKey::decode(8, 64) }, "requests: 16385 is past the limit")]
#[case(PlanKey { page_size: 48, ..PlanKey::decode(8, 64) }, "page_size: wanted a power of two from 1 to 256, got 48")]
#[case(PlanKey { page_size: 512, ..PlanKey::decode(8, 64) }, "page_size: wanted a power of two")]
#[case(PlanKey { page_size: 0, ..PlanKey::decode(8, 64) }, "page_size: wanted a power of two")]
#[case(PlanKey { query: QueryPrecision::Bf16, ..PlanKey::decode(8, 64) }, "CUDA backend: query precision bf16 (fp16 and e4m3 are)")]
#[case(PlanKey { max_q_len: 0, ..PlanKey::decode(8, 64) }, "max_q_len: wanted at least 1")]
#[case(PlanKey { max_q_len: 1, ..PlanKey::block(2, 8, 64) }, "max_q_len: wanted at least tokens / requests = 16 / 2, got 1")]
#[case(PlanKey { table_width: 0, ..PlanKey::decode(8, 64) }, "table_width: wanted at least 1")]
#[case(PlanKey { table_width: 1 << 20, page_size: 256, ..PlanKey::decode(8, 64) }, "table_width * page_size: 268435456 is past")]
#[case(PlanKey { rank: 8, ..PlanKey::decode(8, 64) }, "rank: 8 is past the limit of 7")]
#[case(PlanKey { route_bound: Some(0), ..PlanKey::decode(8, 64) }, "route_bound: wanted at least 1")]
fn a_key_past_a_limit_is_refused_by_name(#[case] key: PlanKey, #[case] wanted: &str) {
    let text = Plan::new(key, WeightKind::Nvfp4, 132).unwrap_err().to_string();
    assert!(text.starts_with(wanted), "{text}\n wanted: {wanted}");
}

/// FlashAttention-3 needs its feature and E4M3 queries.
#[test]
fn fa3_is_planned_where_it_is_built() {
    let key = PlanKey { engine: AttentionEngine::Fa3, query: QueryPrecision::E4m3, ..PlanKey::decode(8, 9000) };
    let made = Plan::new(key.clone(), WeightKind::Nvfp4, 132);
    if cfg!(feature = "fa3") {
        let made = made.unwrap();
        assert!(made.to_string().contains("attention  fa3, at most 57 splits a request"), "{made}");
        assert!(made.workspace_bytes > plan(PlanKey::decode(8, 9000)).workspace_bytes / 2);
        let text =
            Plan::new(PlanKey { query: QueryPrecision::Fp16, ..key }, WeightKind::Nvfp4, 132).unwrap_err().to_string();
        assert_eq!(text, "CUDA backend: query precision fp16 with the attention engine fa3 (e4m3 is) is not supported");
    } else {
        let text = made.unwrap_err().to_string();
        assert!(
            text.starts_with("CUDA backend: the attention engine fa3 in this build (it lacks the feature"),
            "{text}"
        );
    }
}

#[test]
fn a_plan_prints_its_decisions() {
    let text = plan(PlanKey { kind: LayerKind::Sliding, ..PlanKey::block(4, 8, 9000) }).to_string();
    for part in [
        "32 tokens of 4 requests (q_len <= 8), sliding attention, page 9000 x 1, queries fp16",
        "dependent launch on",
        "qkv_gate   skinny n=32, [0..2304, 8192]",
        "window 2048",
        "router     Tiled, splits 8",
        "experts    nvfp4, ",
        "unpooler   skinny n=32, [0..8192, 4096]",
    ] {
        assert!(text.contains(part), "{part:?} is not in\n{text}");
    }
    let text = plan(PlanKey::block(1, 8192, 16384)).to_string();
    for part in ["attention  tiled", "router     Tiled", "many-token kernel", "1 pass(es) of 65536 routes"] {
        assert!(text.contains(part), "{part:?} is not in\n{text}");
    }
}

#[test]
fn plans_are_plain_data() {
    for key in [
        PlanKey::decode(1, 8192),
        PlanKey::block(1, 2048, 10240),
        PlanKey { query: QueryPrecision::E4m3, ..PlanKey::decode(64, 99) },
    ] {
        let plan = plan(key);
        let text = serde_json::to_string(&plan).unwrap();
        assert_eq!(serde_json::from_str::<Plan>(&text).unwrap(), plan);
    }
}

#[test]
fn the_same_key_gives_the_same_plan() {
    assert_eq!(plan(PlanKey::decode(9, 8192)), plan(PlanKey::decode(9, 8192)));
}

#[test]
fn a_generous_bound_on_the_query_length_costs_nothing() {
    let generous = PlanKey { max_q_len: 4096, ..PlanKey::decode(1, 8192) };
    assert_eq!(plan(generous), plan(PlanKey::decode(1, 8192)));
}

#[test]
fn an_empty_step_is_planned() {
    let key = PlanKey { tokens: 0, max_q_len: 0, ..PlanKey::decode(0, 0) };
    assert_eq!(plan(key).launch_count(), 0);
}

/// The largest step of the model's deployment keeps to a few GB.
#[test]
fn workspaces_stay_in_proportion() {
    let mib = |key| plan(key).workspace_bytes >> 20;
    assert!(mib(PlanKey::decode(1, 131072)) < 8, "{}", mib(PlanKey::decode(1, 131072)));
    assert!(mib(PlanKey::decode(256, 8192)) < 128, "{}", mib(PlanKey::decode(256, 8192)));
    assert!(mib(PlanKey::block(1, 16384, 24576)) < 6144, "{}", mib(PlanKey::block(1, 16384, 24576)));
}

#[test]
fn short_requests_are_the_last_of_a_longer_batch() {
    let of = |short| {
        let key =
            PlanKey { tokens: 576, requests: 65, max_q_len: 512, short: Some(short), ..PlanKey::decode(65, 9000) };
        Plan::new(key, WeightKind::Nvfp4, 132)
    };
    let good = ShortRequests { requests: 64, tokens: 64, max_q_len: 1 };
    let plan = of(good).unwrap();
    assert!(plan.launches.attention.tiled && plan.launches.short_attention.is_some());
    assert!(plan.to_string().contains("of the last 64 requests (64 tokens, q_len <= 1)"), "{plan}");
    let refused = |short| of(short).unwrap_err().to_string();
    let text = refused(ShortRequests { requests: 65, ..good });
    assert_eq!(text, "short.requests: wanted some of the 65 there are, not all, got 65");
    let text = refused(ShortRequests { tokens: 576, ..good });
    assert_eq!(text, "short.tokens: wanted some of the 576 there are, not all, got 576");
    assert_eq!(refused(ShortRequests { max_q_len: 17, ..good }), "short.max_q_len: wanted 1 to 16, got 17");
    // Where all are short there is one kernel for all.
    let key = PlanKey { tokens: 72, requests: 65, max_q_len: 8, short: Some(good), ..PlanKey::decode(65, 9000) };
    let plan = Plan::new(key, WeightKind::Nvfp4, 132).unwrap();
    assert_eq!((plan.key.short, plan.launches.short_attention), (None, None));
}
