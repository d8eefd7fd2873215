//! The C header: it compiles as C, its structs are the library's, and calls that fail say why.
#![allow(unsafe_code)]

use muse_spark_layer::capi::*;
use std::ffi::{c_char, CStr};
use std::mem::{offset_of, size_of};
use std::path::Path;
use std::process::Command;

macro_rules! fields {
    ($($name:literal $t:ty { $($field:ident),* })*) => {
        /// `(C struct, C field, Rust size or offset)`, a size where the field is empty.
        fn layout() -> Vec<(&'static str, &'static str, usize)> {
            vec![$(($name, "", size_of::<$t>()), $(($name, stringify!($field), offset_of!($t, $field)),)*)*]
        }
    };
}

fields! {
    "msl_tensor" MslTensor { name, data, dtype, rank, shape }
    "msl_layer_options" MslLayerOptions { struct_size, device, experts, dimensions }
    "msl_plan_options" MslPlanOptions {
        struct_size, tokens, requests, max_q_len, table_width, page_size, kind, engine, query, rank, taps,
        plain_launch, route_bound, skip_slot_zero, synchronize, short_requests, short_tokens, short_max_q_len
    }
    "msl_tap" MslTap { name, data }
    "msl_step" MslStep {
        struct_size, tap_count, attn_input, positions, cache_loc, cu_seqlens_q, cache_seqlens, page_table, table_stride,
        k_scale, v_scale, k_cache, v_cache, pages, stream, local_start, num_tokens_non_padded, topk_ids, hidden,
        stream_out, attn_out, stream_after_attn, moe_mix, taps, scheduler_metadata
    }
}

#[test]
fn the_header_is_c_and_its_structs_are_the_library_s() {
    let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).join("capi_header");
    std::fs::create_dir_all(&folder).unwrap();
    let mut program = String::from("#include <stdio.h>\n#include \"muse_spark_layer.h\"\nint main(void) {\n");
    for (name, field, _) in layout() {
        let value = if field.is_empty() { format!("sizeof({name})") } else { format!("offsetof({name}, {field})") };
        program += &format!("  printf(\"%zu\\n\", (size_t){value});\n");
    }
    program += "  printf(\"%u\\n\", (unsigned)MSL_ABI_VERSION);\n  return 0;\n}\n";
    let (source, binary) = (folder.join("layout.c"), folder.join("layout"));
    std::fs::write(&source, program).unwrap();
    let compiler = std::env::var("CC").unwrap_or_else(|_| "cc".into());
    let include = Path::new(env!("CARGO_MANIFEST_DIR")).join("csrc/include");
    let compiled = Command::new(&compiler)
        .args(["-std=c99", "-Wall", "-Wextra", "-Werror", "-pedantic", "-I"])
        .args([&include, &source, Path::new("-o"), &binary])
        .output();
    let compiled = match compiled {
        Ok(output) => output,
        Err(e) => return eprintln!("skipped: no C compiler `{compiler}`: {e}"),
    };
    assert!(compiled.status.success(), "{}", String::from_utf8_lossy(&compiled.stderr));
    let printed = Command::new(&binary).output().unwrap().stdout;
    let printed: Vec<usize> = String::from_utf8(printed).unwrap().lines().map(|l| l.parse().unwrap()).collect();
    let layout = layout();
    assert_eq!(printed.len(), layout.len() + 1);
    for ((name, field, rust), c) in layout.iter().zip(&printed) {
        assert_eq!(rust, c, "{name}.{field}");
    }
    assert_eq!(printed[layout.len()], ABI_VERSION as usize);
}

fn last_error() -> String {
    // SAFETY: a zero-terminated string of this thread.
    unsafe { CStr::from_ptr(msl_last_error()) }.to_string_lossy().into_owned()
}

fn options(experts: i32) -> MslLayerOptions {
    MslLayerOptions { struct_size: size_of::<MslLayerOptions>() as u32, device: 0, experts, dimensions: 0 }
}

#[test]
fn versions_are_there() {
    assert_eq!(msl_abi_version(), 1);
    // SAFETY: a zero-terminated string.
    let version = unsafe { CStr::from_ptr(msl_version()) };
    assert_eq!(version.to_str().unwrap(), env!("CARGO_PKG_VERSION"));
}

#[test]
fn bad_arguments_are_statuses_with_a_text() {
    let mut layer = std::ptr::null_mut();
    // SAFETY: null pointers and live ones; what is checked here.
    unsafe {
        assert_eq!(msl_layer_create(std::ptr::null(), std::ptr::null(), 0, &mut layer), 1);
        assert_eq!(last_error(), "msl_layer_options: null pointer");
        assert_eq!(msl_layer_create(&options(0), std::ptr::null(), 3, &mut layer), 1);
        assert_eq!(last_error(), "weights: null pointer");
        assert_eq!(msl_layer_create(&options(0), std::ptr::null(), 0, &mut layer), 1);
        assert_eq!(last_error(), "qkv_gate: missing");
        assert_eq!(msl_layer_create(&options(9), std::ptr::null(), 0, &mut layer), 1);
        assert_eq!(last_error(), "experts: wanted 0 to 1, got 9");
        let old = MslLayerOptions { struct_size: 4, ..options(0) };
        assert_eq!(msl_layer_create(&old, std::ptr::null(), 0, &mut layer), 1);
        assert_eq!(last_error(), "msl_layer_options.struct_size: wanted at least 12, got 4");
        assert!(layer.is_null());
        let mut plan = std::ptr::null_mut();
        assert_eq!(msl_plan_create(std::ptr::null(), std::ptr::null(), &mut plan), 1);
        assert_eq!(last_error(), "layer: null pointer");
        assert_eq!(
            msl_forward(
                std::ptr::null(),
                std::ptr::null(),
                std::ptr::null_mut(),
                std::ptr::null(),
                std::ptr::null_mut()
            ),
            1
        );
        msl_layer_destroy(std::ptr::null_mut());
        msl_plan_destroy(std::ptr::null_mut());
        msl_workspace_destroy(std::ptr::null_mut());
        let mut metadata = std::ptr::null_mut();
        let (plan, from, to) = (std::ptr::null(), std::ptr::null(), std::ptr::null_mut());
        assert_eq!(msl_scheduler_metadata_prepare(plan, from, from, to, to, &mut metadata), 1);
        assert_eq!(last_error(), "plan: null pointer");
        assert!(metadata.is_null());
        assert_eq!(msl_plan_metadata_words(plan), 0);
        msl_scheduler_metadata_destroy(metadata);
    }
}

#[test]
fn a_newer_header_is_taken_when_its_new_fields_are_zero() {
    #[repr(C)]
    struct Newer {
        known: MslLayerOptions,
        new_field: u32,
    }
    let mut layer = std::ptr::null_mut();
    let mut newer =
        Newer { known: MslLayerOptions { struct_size: size_of::<Newer>() as u32, ..options(0) }, new_field: 0 };
    // SAFETY: `struct_size` bytes follow each address.
    unsafe {
        assert_eq!(msl_layer_create((&raw const newer).cast(), std::ptr::null(), 0, &mut layer), 1);
        assert_eq!(last_error(), "qkv_gate: missing");
        newer.new_field = 1;
        assert_eq!(msl_layer_create((&raw const newer).cast(), std::ptr::null(), 0, &mut layer), 1);
        assert!(last_error().contains("this library does not know them"), "{}", last_error());
    }
}

#[test]
fn the_error_text_belongs_to_the_thread() {
    let text = std::thread::spawn(|| {
        let mut layer = std::ptr::null_mut();
        let name = c"router".as_ptr() as *const c_char;
        let tensor = MslTensor { name, data: std::ptr::null(), dtype: 99, rank: 1, shape: [1, 0, 0, 0] };
        // SAFETY: live arguments.
        unsafe { msl_layer_create(&options(0), &tensor, 1, &mut layer) };
        last_error()
    })
    .join()
    .unwrap();
    assert_eq!(text, "router: dtype: wanted 0 to 6, got 99");
    assert_eq!(last_error(), "");
}
