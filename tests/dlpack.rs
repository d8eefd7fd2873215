//! DLPack tensors as a step's tensors: what they say is what the step sees, what does not fit is refused by name,
//! and the producer's deleter runs once.
#![allow(unsafe_code)]

use muse_spark_layer::dlpack::dlpark::ffi::{
    DLDataType, DLDataTypeCode, DLDevice, DLDeviceType, DLManagedTensor, DLManagedTensorVersioned, DLPackVersion,
    DLTensor,
};
use muse_spark_layer::dlpack::dlpark::{DlpackFlags, Managed};
use muse_spark_layer::dlpack::{view, Access};
use muse_spark_layer::step::{check_step, AttentionInput};
use muse_spark_layer::{
    DType, DeviceInput, DeviceOutput, DeviceTaps, DeviceTensor, PagedKvCache, Plan, PlanKey, WeightKind,
};
use std::ffi::c_void;
use std::sync::atomic::{AtomicUsize, Ordering};

/// What a producer keeps for a tensor it has handed out.
struct Producer {
    shape: Vec<i64>,
    strides: Vec<i64>,
    deleted: &'static AtomicUsize,
}

unsafe extern "C" fn delete(tensor: *mut DLManagedTensor) {
    // SAFETY: made by `legacy`, deleted once.
    unsafe {
        let tensor = Box::from_raw(tensor);
        let producer = Box::from_raw(tensor.manager_ctx.cast::<Producer>());
        producer.deleted.fetch_add(1, Ordering::Relaxed);
    }
}

unsafe extern "C" fn delete_versioned(tensor: *mut DLManagedTensorVersioned) {
    // SAFETY: made by `versioned`, deleted once.
    unsafe {
        let tensor = Box::from_raw(tensor);
        drop(Box::from_raw(tensor.manager_ctx.cast::<Producer>()));
    }
}

static DELETED: AtomicUsize = AtomicUsize::new(0);

/// A descriptor as a producer fills it, and what it keeps. No strides: none are given.
fn descriptor(
    address: u64,
    dtype: DLDataType,
    shape: &[i64],
    strides: Option<&[i64]>,
    device: DLDevice,
    deleted: &'static AtomicUsize,
) -> (DLTensor, *mut c_void) {
    let mut producer =
        Box::new(Producer { shape: shape.to_vec(), strides: strides.unwrap_or_default().to_vec(), deleted });
    let tensor = DLTensor {
        data: address as *mut c_void,
        device,
        ndim: shape.len() as i32,
        dtype,
        shape: producer.shape.as_mut_ptr(),
        strides: if strides.is_some() { producer.strides.as_mut_ptr() } else { std::ptr::null_mut() },
        byte_offset: 0,
    };
    (tensor, Box::into_raw(producer).cast())
}

fn legacy_of(
    address: u64,
    dtype: DLDataType,
    shape: &[i64],
    strides: Option<&[i64]>,
    device: DLDevice,
    deleted: &'static AtomicUsize,
) -> Managed<DLManagedTensor> {
    let (dl_tensor, manager_ctx) = descriptor(address, dtype, shape, strides, device, deleted);
    let raw = Box::into_raw(Box::new(DLManagedTensor { dl_tensor, manager_ctx, deleter: Some(delete) }));
    // SAFETY: a whole tensor, owned here.
    unsafe { Managed::from_raw(raw) }.unwrap()
}

fn legacy(address: u64, dtype: DLDataType, shape: &[i64]) -> Managed<DLManagedTensor> {
    legacy_of(address, dtype, shape, None, DLDevice::cuda(0), &DELETED)
}

fn versioned(
    dtype: DLDataType,
    shape: &[i64],
    strides: &[i64],
    flags: DlpackFlags,
) -> Managed<DLManagedTensorVersioned> {
    let (dl_tensor, manager_ctx) = descriptor(SOMEWHERE, dtype, shape, Some(strides), DLDevice::cuda(0), &DELETED);
    let raw = Box::into_raw(Box::new(DLManagedTensorVersioned {
        version: DLPackVersion { major: 1, minor: 2 },
        manager_ctx,
        deleter: Some(delete_versioned),
        flags,
        dl_tensor,
    }));
    // SAFETY: a whole tensor, owned here.
    unsafe { Managed::from_raw(raw) }.unwrap()
}

const SOMEWHERE: u64 = 0x7000_0000_0000;

fn refused(managed: &Managed<DLManagedTensor>) -> String {
    // SAFETY: nothing follows the address.
    unsafe { view("positions", managed, 0, Access::Read) }.unwrap_err().to_string()
}

#[test]
fn a_whole_step_of_dlpack_tensors_is_accepted() {
    let (t, b, width) = (12, 3, 40);
    let mut kept = Vec::new();
    let mut slot = 0;
    let mut import = |dtype: DLDataType, shape: &[i64], strides: Option<&[i64]>, access: Access| -> DeviceTensor {
        slot += 1;
        let managed = legacy_of(SOMEWHERE + (slot << 32), dtype, shape, strides, DLDevice::cuda(0), &DELETED);
        // SAFETY: nothing follows the address; `kept` keeps the owner.
        let made = unsafe { view("a tensor", &managed, 0, access) }.unwrap();
        assert_eq!(made.ptr(), SOMEWHERE + (slot << 32));
        kept.push(managed);
        made
    };
    use DLDataType as D;
    let pool = [7, 16, 2, 64];
    let input = DeviceInput {
        attention: AttentionInput {
            attn_input: import(D::BF16, &[t, 8192], None, Access::Read),
            positions: import(D::I64, &[t], Some(&[1]), Access::Read),
            cache_loc: import(D::I64, &[t], None, Access::Read),
            cu_seqlens_q: import(D::I32, &[b + 1], None, Access::Read),
            cache_seqlens: import(D::I32, &[b], None, Access::Read),
            page_table: import(D::I32, &[b, width], Some(&[100, 1]), Access::Read),
            k_scale: import(D::F32, &[], None, Access::Read),
            v_scale: import(D::F32, &[1], None, Access::Read),
            cache: PagedKvCache::new(
                import(D::F8E4M3FN, &pool, None, Access::Write),
                import(D::U8, &pool, Some(&[2048, 128, 64, 1]), Access::Write),
            )
            .unwrap_or_else(|e| panic!("{e}")),
            scheduler_metadata: None,
        },
        stream: import(D::F32, &[t, 8192], None, Access::Read),
        local_start: import(D::I32, &[1], None, Access::Read),
        num_tokens_non_padded: Some(import(D::I32, &[1], None, Access::Read)),
    };
    let output = DeviceOutput {
        hidden: Some(import(D::BF16, &[t, 8192], None, Access::Write)),
        stream: import(D::F32, &[t, 8192], None, Access::Write),
        topk_ids: import(D::I32, &[t, 8], None, Access::Write),
        taps: DeviceTaps::default(),
    };
    let key = PlanKey { page_size: 16, ..PlanKey::block(b as u32, 4, width as u32) };
    let plan = Plan::new(key, WeightKind::Nvfp4, 132).unwrap();
    check_step(&plan, &input, &output, true).map(|_| ()).unwrap();
    assert_eq!(input.attention.page_table.strides(), [100, 1]);
    // And the step's own checks see what DLPack said.
    let narrow = DeviceInput { stream: import(D::F32, &[t, 4096], None, Access::Read), ..input.clone() };
    let text = check_step(&plan, &narrow, &output, true).map(|_| ()).unwrap_err().to_string();
    assert_eq!(text, "stream: wanted shape [12, 8192], got [12, 4096]");
    let apart = import(D::F32, &[t, 8192], Some(&[16384, 1]), Access::Read);
    let text = check_step(&plan, &DeviceInput { stream: apart, ..input }, &output, true).map(|_| ()).unwrap_err();
    assert_eq!(text.to_string(), "stream: wanted a contiguous tensor, got strides [16384, 1]");
}

#[test]
fn the_byte_offset_counts() {
    let managed = legacy(SOMEWHERE, DLDataType::I64, &[3]);
    // SAFETY: owned here, no one else looks.
    unsafe { (*managed.as_ptr()).dl_tensor.byte_offset = 48 };
    // SAFETY: nothing follows the address.
    let made = unsafe { view("positions", &managed, 0, Access::Read) }.unwrap();
    assert_eq!((made.ptr(), made.dtype(), made.shape()), (SOMEWHERE + 48, DType::I64, &[3usize][..]));
}

#[test]
fn what_no_step_takes_is_refused_by_name() {
    let i64s = DLDataType::I64;
    let on = |device_type, device_id| DLDevice { device_type, device_id };
    let of = |dtype, device| legacy_of(SOMEWHERE, dtype, &[3], None, device, &DELETED);
    let refusal = |dtype, device| refused(&of(dtype, device));
    let cuda = DLDevice::cuda(0);
    assert_eq!(refusal(i64s, DLDevice::CPU), "positions: wanted device memory, got host memory");
    assert_eq!(refusal(i64s, on(DLDeviceType::CUDAHOST, 0)), "positions: wanted device memory, got pinned host memory");
    assert_eq!(refusal(i64s, on(DLDeviceType::ROCM, 0)), "positions: wanted device memory, got another kind of memory");
    assert_eq!(refusal(i64s, DLDevice::cuda(3)), "positions: wanted memory of device 0, got device 3");
    let wanted = "positions: dtype: wanted f32, bf16, f16, e4m3, u8, i32 or i64, got";
    assert_eq!(refusal(DLDataType::F64, cuda), format!("{wanted} code 2, 64 bits, 1 lanes"));
    assert_eq!(
        refusal(DLDataType::new(DLDataTypeCode::FLOAT, 32, 4), cuda),
        format!("{wanted} code 2, 32 bits, 4 lanes")
    );
    assert_eq!(refusal(DLDataType::F8E5M2, cuda).split(" got ").next(), Some(wanted.trim_end_matches(" got")));
    let strided = |strides: &[i64]| legacy_of(SOMEWHERE, i64s, &[3], Some(strides), cuda, &DELETED);
    assert_eq!(refused(&strided(&[-1])), "positions: wanted strides that are not negative, got strides [-1]");
    let negative = legacy(SOMEWHERE, i64s, &[-3]);
    assert_eq!(refused(&negative), "positions: wanted a valid DLPack tensor, got shape dimension 0 is negative: -3");
}

#[test]
fn read_only_tensors_are_inputs() {
    let managed = versioned(DLDataType::F32, &[2, 8192], &[8192, 1], DlpackFlags::READ_ONLY);
    // SAFETY: nothing follows the address.
    let (read, written) =
        unsafe { (view("stream", &managed, 0, Access::Read), view("stream (output)", &managed, 0, Access::Write)) };
    assert_eq!(read.unwrap().shape(), [2, 8192]);
    assert_eq!(
        written.unwrap_err().to_string(),
        "stream (output): wanted a tensor that may be written, got a read-only one"
    );
    let writable = versioned(DLDataType::F32, &[2, 8192], &[8192, 1], DlpackFlags::empty());
    // SAFETY: as above.
    unsafe { view("stream (output)", &writable, 0, Access::Write) }.unwrap();
}

#[test]
fn the_producer_s_deleter_runs_once() {
    static ONCE: AtomicUsize = AtomicUsize::new(0);
    let managed = legacy_of(SOMEWHERE, DLDataType::I64, &[3], None, DLDevice::cuda(0), &ONCE);
    // SAFETY: nothing follows the address.
    let made = unsafe { view("positions", &managed, 0, Access::Read) }.unwrap();
    drop(made);
    assert_eq!(ONCE.load(Ordering::Relaxed), 0, "a view owns nothing");
    drop(managed);
    assert_eq!(ONCE.load(Ordering::Relaxed), 1);
}
