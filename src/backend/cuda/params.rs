//! The plain structs that cross to C++, one per operation: `csrc/include/params.h` field by field, where
//! each field's shape, type and stride is written down. The test at the end compares sizes and offsets
//! with what the C++ compiler made of them.
#![allow(unsafe_code)]

use std::ffi::c_void;

use cxx::{kind::Trivial, type_id, ExternType};

/// Declares each struct, its layout as text for the test, and the all-zero value.
macro_rules! params {
    ($($(#[$doc:meta])* struct $name:ident { $($field:ident: $kind:ty,)* })*) => {
        $(
            $(#[$doc])*
            #[repr(C)]
            #[derive(Debug, Clone, Copy)]
            #[allow(missing_docs)]
            pub struct $name { $(pub $field: $kind,)* }

            // SAFETY: a #[repr(C)] struct of scalars and pointers; the layout test compares it with C++.
            unsafe impl ExternType for $name {
                type Id = params!(@id $name);
                type Kind = Trivial;
            }

            impl Default for $name {
                /// Null pointers and zeros.
                fn default() -> Self {
                    // SAFETY: every field is an integer, a float or a raw pointer, for which zero is valid.
                    unsafe { std::mem::zeroed() }
                }
            }
        )*

        /// `Struct size` and `Struct.field offset size`, a line each, in declaration order.
        pub fn layouts() -> String {
            let mut text = String::new();
            $(
                text += &format!("{} {}\n", stringify!($name), size_of::<$name>());
                $(text += &format!(
                    "{}.{} {} {}\n",
                    stringify!($name),
                    stringify!($field),
                    std::mem::offset_of!($name, $field),
                    size_of::<$kind>()
                );)*
            )*
            text
        }
    };
    (@id Launch) => { type_id!("msl::Launch") };
    (@id DenseParams) => { type_id!("msl::DenseParams") };
    (@id QkNormRopeAppendParams) => { type_id!("msl::QkNormRopeAppendParams") };
    (@id AttentionParams) => { type_id!("msl::AttentionParams") };
    (@id Fa3AttentionParams) => { type_id!("msl::Fa3AttentionParams") };
    (@id OutNormGateParams) => { type_id!("msl::OutNormGateParams") };
    (@id AttnBoundaryParams) => { type_id!("msl::AttnBoundaryParams") };
    (@id RouterParams) => { type_id!("msl::RouterParams") };
    (@id RouterTiledParams) => { type_id!("msl::RouterTiledParams") };
    (@id RouterTopkParams) => { type_id!("msl::RouterTopkParams") };
    (@id BoundaryRouterParams) => { type_id!("msl::BoundaryRouterParams") };
    (@id PreExpertNormParams) => { type_id!("msl::PreExpertNormParams") };
    (@id ExpertGemmParams) => { type_id!("msl::ExpertGemmParams") };
    (@id CombineParams) => { type_id!("msl::CombineParams") };
    (@id FfnBoundaryParams) => { type_id!("msl::FfnBoundaryParams") };
    (@id SliceSumParams) => { type_id!("msl::SliceSumParams") };
    (@id PeerParams) => { type_id!("msl::PeerParams") };
    (@id PackDenseParams) => { type_id!("msl::PackDenseParams") };
    (@id PackRouterParams) => { type_id!("msl::PackRouterParams") };
    (@id PackExpertsParams) => { type_id!("msl::PackExpertsParams") };
}

params! {
    /// `msl::Launch`.
    struct Launch {
        stream: *mut c_void,
        sm_count: i32,
        dependent: i32,
    }
    /// `msl::DenseParams`.
    struct DenseParams {
        weight: *const c_void,
        x: *const c_void,
        out: *mut c_void,
        tokens: i32,
        rows: i32,
        k: i32,
        x_stride: i32,
        out_stride: i32,
        splits: i32,
        out_f32: i32,
        tile_n: i32,
        tile_rows: i32,
        ready: *const u32,
        ready_at: i32,
    }
    /// `msl::QkNormRopeAppendParams`.
    struct QkNormRopeAppendParams {
        qkv: *const f32,
        positions: *const i64,
        cache_loc: *const i64,
        k_scale: *const f32,
        v_scale: *const f32,
        inv_freq: *const f32,
        k_cache: *mut c_void,
        v_cache: *mut c_void,
        q: *mut c_void,
        gate: *mut f32,
        cache_rows: i64,
        tokens: i32,
        splits: i32,
        e4m3_query: i32,
        skip_slot_zero: i32,
    }
    /// `msl::AttentionParams`.
    struct AttentionParams {
        q: *const c_void,
        k_cache: *const c_void,
        v_cache: *const c_void,
        page_table: *const i32,
        cache_seqlens: *const i32,
        cu_seqlens_q: *const i32,
        k_scale: *const f32,
        v_scale: *const f32,
        acc: *mut f32,
        lse: *mut f32,
        gate: *const f32,
        out: *mut c_void,
        attn_core: *mut f32,
        kv_scratch: *mut c_void,
        kv_scratch_bytes: i64,
        pages: i64,
        table_stride: i64,
        table_width: i32,
        page_log2: i32,
        tokens: i32,
        requests: i32,
        max_q_len: i32,
        window: i32,
        splits: i32,
        tiled: i32,
        gate_splits: i32,
        gate_tokens: i32,
        softmax_scale: f32,
    }
    /// `msl::Fa3AttentionParams` of `csrc/include/fa3.h`.
    struct Fa3AttentionParams {
        q_half: *const c_void,
        q: *mut c_void,
        k_cache: *const c_void,
        v_cache: *const c_void,
        page_table: *const i32,
        cache_seqlens: *const i32,
        cu_seqlens_q: *const i32,
        k_scale: *const f32,
        v_scale: *const f32,
        out: *mut c_void,
        lse: *mut f32,
        acc: *mut f32,
        acc_lse: *mut f32,
        metadata: *mut i32,
        pages: i64,
        table_stride: i64,
        table_width: i32,
        page_log2: i32,
        tokens: i32,
        requests: i32,
        max_q_len: i32,
        window: i32,
        splits: i32,
        softmax_scale: f32,
    }
    /// `msl::OutNormGateParams`.
    struct OutNormGateParams {
        acc: *const f32,
        lse: *const f32,
        joined: *const c_void,
        gate: *const f32,
        v_scale: *const f32,
        out: *mut c_void,
        attn_core: *mut f32,
        tokens: i32,
        splits: i32,
    }
    /// `msl::AttnBoundaryParams`.
    struct AttnBoundaryParams {
        stream: *const f32,
        branch: *const c_void,
        alpha: *const f32,
        beta: *const f32,
        norm_weight: *const f32,
        stream_out: *mut f32,
        ffn_input: *mut c_void,
        factor: *mut f32,
        tokens: i32,
        planes: i32,
    }
    /// `msl::RouterParams`.
    struct RouterParams {
        weight: *const f32,
        ffn_input: *const c_void,
        logits: *mut f32,
        tokens: i32,
        splits: i32,
        ready: *mut u32,
    }
    /// `msl::RouterTiledParams`.
    struct RouterTiledParams {
        weight: *const c_void,
        stream: *const f32,
        factor: *const f32,
        logits: *mut f32,
        tokens: i32,
        splits: i32,
        ready: *mut u32,
    }
    /// `msl::RouterTopkParams`.
    struct RouterTopkParams {
        logits: *const f32,
        bias: *const f32,
        local_start: *const i32,
        topk_ids: *mut i32,
        topk_scores: *mut f32,
        router_logits: *mut f32,
        expert_offsets: *mut i32,
        route_token: *mut i32,
        token_route: *mut i32,
        token_masks: *mut u32,
        counters: *mut u32,
        num_tokens_non_padded: *const i32,
        tokens: i32,
        splits: i32,
        behind: i32,
    }
    /// `msl::BoundaryRouterParams`.
    struct BoundaryRouterParams {
        stream: *const f32,
        branch: *const c_void,
        alpha: *const f32,
        beta: *const f32,
        norm_weight: *const f32,
        weight: *const f32,
        logits: *mut f32,
        sums: *mut f32,
        stream_out: *mut f32,
        ffn_input: *mut c_void,
        splits: i32,
        ready: *mut u32,
    }
    /// `msl::PreExpertNormParams`.
    struct PreExpertNormParams {
        pooled: *const f32,
        norm_weight: *const f32,
        token_route: *const i32,
        x: *mut c_void,
        expert_input: *mut f32,
        ready: *mut u32,
        tokens: i32,
        splits: i32,
        route_begin: i32,
        route_bound: i32,
    }
    /// `msl::ExpertGemmParams`.
    struct ExpertGemmParams {
        weight: *const c_void,
        scale: *const f32,
        x: *const c_void,
        out: *mut c_void,
        expert_offsets: *const i32,
        carry: *mut f32,
        carry_flags: *mut u32,
        swiglu: i32,
        weight_kind: i32,
        splits: i32,
        few: i32,
        route_begin: i32,
        route_bound: i32,
        max_routes_per_expert: i32,
        carry_words: i32,
    }
    /// `msl::CombineParams`.
    struct CombineParams {
        y: *const c_void,
        norm_weight: *const f32,
        topk_scores: *const f32,
        token_route: *const i32,
        expert_offsets: *const i32,
        accumulate: *mut f32,
        moe_mix: *mut c_void,
        y_f32: i32,
        tokens: i32,
        splits: i32,
        route_begin: i32,
        route_bound: i32,
    }
    /// `msl::FfnBoundaryParams`.
    struct FfnBoundaryParams {
        stream: *const f32,
        branch: *const c_void,
        alpha: *const f32,
        beta: *const f32,
        post_norm_weight: *const f32,
        next_norm_weight: *const f32,
        stream_out: *mut f32,
        hidden: *mut c_void,
        ffn_out: *mut f32,
        tokens: i32,
        splits: i32,
        branch_f32: i32,
        column_begin: i32,
        columns: i32,
        slice: i32,
    }
    /// `msl::SliceSumParams`.
    struct SliceSumParams {
        parts: *const f32,
        out: *mut f32,
        tokens: i32,
        splits: i32,
        columns: i32,
    }
    /// `msl::PackDenseParams`.
    struct PackDenseParams {
        src: *const c_void,
        dst: *mut c_void,
        rows: i32,
        k: i32,
    }
    /// `msl::PackRouterParams`.
    struct PackRouterParams {
        src: *const f32,
        norm_weight: *const f32,
        dst: *mut c_void,
    }
    /// `msl::PackExpertsParams`.
    struct PackExpertsParams {
        codes: *const c_void,
        block_scale: *const c_void,
        global_scale: *const f32,
        dst: *mut c_void,
        scale: *mut f32,
        bad_scale: *mut i32,
        experts: i32,
        rows: i32,
        k: i32,
        swiglu: i32,
        weight_kind: i32,
        scales_per_expert: i32,
    }
    /// `msl::PeerParams`.
    struct PeerParams {
        data: *mut c_void,
        inboxes: [*mut u32; 8],
        calls: *mut u32,
        lost: *mut u32,
        timeout_ns: u64,
        elements: i32,
        capacity: i32,
        rank: i32,
        ranks: i32,
    }
}

#[cfg(test)]
mod tests {
    use crate::backend::cuda::bridge;

    #[test]
    fn layouts_are_those_of_params_h() {
        let rust = super::layouts();
        let cpp = bridge::layouts();
        assert!(rust.starts_with("Launch 16\n"), "{rust}");
        for (ours, theirs) in rust.lines().zip(cpp.lines()) {
            assert_eq!(ours, theirs, "params.rs on the left, csrc/include/params.h on the right");
        }
        assert_eq!(rust.lines().count(), cpp.lines().count());
    }
}
