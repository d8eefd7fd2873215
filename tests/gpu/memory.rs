//! Device memory as the tests use it: of exactly the size asked for, between bands that nothing may write, all
//! bytes 0xFF (NaN) until something is written.

use cudarc::driver::sys;
use muse_spark_layer::backend::cuda::{Buffer, Device};
use muse_spark_layer::{DType, DeviceTensor, Plan, Stream, Workspace};
use std::ffi::{c_void, CStr};
use std::sync::OnceLock;

use crate::harness::Gpu;

/// Bytes of a band. None for memcheck, which sees the end of an allocation by itself, and would not see past a band.
fn band() -> u64 {
    static BAND: OnceLock<u64> = OnceLock::new();
    *BAND.get_or_init(|| if std::env::var_os("MUSE_SPARK_LAYER_NO_BANDS").is_some() { 0 } else { 1 << 16 })
}
/// What bands, outputs and scratch hold before a step.
pub const POISON: u8 = 0xFF;

/// `bytes` bytes between two bands.
pub struct Banded {
    memory: Buffer,
    bytes: u64,
}

impl Banded {
    pub fn new(device: &Device, bytes: u64) -> Banded {
        let memory = device.allocate(bytes + 2 * band()).expect("device memory");
        memory.fill(POISON).expect("fill");
        Banded { memory, bytes }
    }

    pub fn of(device: &Device, bytes: &[u8]) -> Banded {
        let banded = Banded::new(device, bytes.len() as u64);
        banded.write(bytes);
        banded
    }

    pub fn ptr(&self) -> u64 {
        self.memory.ptr() + band()
    }

    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    pub fn view(&self, dtype: DType, shape: &[usize]) -> DeviceTensor {
        assert_eq!(self.bytes, (shape.iter().product::<usize>() * dtype.size()) as u64);
        // SAFETY: as many bytes, alive as long as the test's step, which every test waits for.
        unsafe { DeviceTensor::contiguous(self.ptr(), dtype, shape) }
    }

    /// Writes the whole.
    pub fn write(&self, bytes: &[u8]) {
        assert_eq!(self.bytes, bytes.len() as u64, "another size");
        self.write_at(0, bytes);
    }

    pub fn write_at(&self, offset: u64, bytes: &[u8]) {
        assert!(offset + bytes.len() as u64 <= self.bytes);
        self.memory.write_at(band() + offset, bytes).expect("write");
    }

    pub fn read(&self) -> Vec<u8> {
        self.read_at(0, self.bytes)
    }

    pub fn read_at(&self, offset: u64, bytes: u64) -> Vec<u8> {
        let mut out = vec![0; bytes as usize];
        self.memory.read_at(band() + offset, &mut out).expect("read");
        out
    }

    /// Fills memory and bands; the bands count as intact with this value.
    pub fn fill(&self, value: u8) {
        self.memory.fill(value).expect("fill");
    }

    /// Asserts that the bands still hold `value`.
    #[track_caller]
    pub fn intact(&self, what: &str, value: u8) {
        for (side, at) in [("before", 0), ("after", band() + self.bytes)] {
            let mut band = vec![0; band() as usize];
            self.memory.read_at(at, &mut band).expect("read");
            if let Some(i) = band.iter().position(|b| *b != value) {
                panic!("{what}: byte {i} of the band {side} its {} bytes was written", self.bytes);
            }
        }
    }
}

/// A workspace of exactly the bytes a plan asks for.
pub struct Scratch {
    memory: Banded,
    workspace: Workspace,
    value: u8,
}

impl Scratch {
    pub fn new(gpu: &Gpu, plan: &Plan) -> Scratch {
        let memory = Banded::new(&gpu.device, plan.workspace_bytes);
        let workspace = Self::handle(gpu, &memory);
        Scratch { memory, workspace, value: POISON }
    }

    fn handle(gpu: &Gpu, memory: &Banded) -> Workspace {
        // SAFETY: the memory outlives the handle, and a test's handles on it are used one after the other.
        unsafe { gpu.cuda.workspace_from_raw(memory.ptr(), memory.bytes) }.expect("a workspace")
    }

    pub fn workspace(&mut self) -> &mut Workspace {
        &mut self.workspace
    }

    /// Another handle on the memory, for a capture that takes it away.
    pub fn another(&self, gpu: &Gpu) -> Workspace {
        Self::handle(gpu, &self.memory)
    }

    #[cfg_attr(not(feature = "fa3"), allow(dead_code))]
    pub fn read_at(&self, offset: u64, bytes: u64) -> Vec<u8> {
        self.memory.read_at(offset, bytes)
    }

    /// Fills all but the counters, bands included.
    pub fn fill(&mut self, value: u8) {
        let control = vec![0; muse_spark_layer::workspace::CONTROL_BYTES as usize];
        self.memory.fill(value);
        self.memory.write_at(0, &control);
        self.value = value;
    }

    /// Fills it with NaN.
    pub fn poison(&mut self) {
        self.fill(POISON);
    }

    /// Asserts that nothing beside it was written, and that the counters are zero.
    #[track_caller]
    pub fn intact(&self) {
        self.memory.intact("scratch", self.value);
        let control = self.memory.read_at(0, muse_spark_layer::workspace::CONTROL_BYTES);
        assert!(control.iter().all(|b| *b == 0), "the counters are left zero");
    }
}

/// A kernel of one function, from PTX.
pub fn kernel(device: &Device, ptx: &CStr, name: &CStr) -> sys::CUfunction {
    let _current = device.make_current().expect("a context");
    let (mut module, mut kernel) = (std::ptr::null_mut(), std::ptr::null_mut());
    // SAFETY: zero-terminated texts; handles are written once. The module stays loaded.
    unsafe {
        assert_eq!(sys::cuModuleLoadData(&mut module, ptx.as_ptr().cast()), sys::CUresult::CUDA_SUCCESS);
        assert_eq!(sys::cuModuleGetFunction(&mut kernel, module, name.as_ptr()), sys::CUresult::CUDA_SUCCESS);
    }
    kernel
}

/// Counts on the GPU the 32-bit words in which two pieces of memory differ.
pub struct Differ {
    kernel: sys::CUfunction,
    count: Banded,
}

const DIFFER: &CStr = c"
.version 7.8
.target sm_90
.address_size 64
.visible .entry differ(.param .u64 a, .param .u64 b, .param .u64 words, .param .u64 count)
{
  .reg .pred %p<3>;
  .reg .b32 %r<8>;
  .reg .b64 %rd<10>;
  ld.param.u64 %rd1, [a];
  ld.param.u64 %rd2, [b];
  ld.param.u64 %rd3, [words];
  ld.param.u64 %rd4, [count];
  mov.u32 %r1, %ctaid.x;
  mov.u32 %r2, %ntid.x;
  mov.u32 %r3, %tid.x;
  mad.lo.u32 %r4, %r1, %r2, %r3;
  cvt.u64.u32 %rd5, %r4;
  mov.u32 %r5, %nctaid.x;
  mul.lo.u32 %r5, %r5, %r2;
  cvt.u64.u32 %rd6, %r5;
next:
  setp.ge.u64 %p1, %rd5, %rd3;
  @%p1 bra done;
  shl.b64 %rd7, %rd5, 2;
  add.u64 %rd8, %rd1, %rd7;
  add.u64 %rd9, %rd2, %rd7;
  ld.global.u32 %r6, [%rd8];
  ld.global.u32 %r7, [%rd9];
  add.u64 %rd5, %rd5, %rd6;
  setp.eq.u32 %p2, %r6, %r7;
  @%p2 bra next;
  red.global.add.u32 [%rd4], 1;
  bra next;
done:
  ret;
}
";

impl Differ {
    pub fn new(device: &Device) -> Differ {
        Differ { kernel: kernel(device, DIFFER, c"differ"), count: Banded::of(device, &[0; 4]) }
    }

    /// Queues the comparison of `a` with `b`. The device is current.
    pub fn queue(&self, a: &Banded, b: &Banded, stream: Stream) {
        assert_eq!(a.bytes % 4, 0);
        assert_eq!(a.bytes, b.bytes);
        let mut values = [a.ptr(), b.ptr(), a.bytes / 4, self.count.ptr()];
        let mut arguments = values.each_mut().map(|v| std::ptr::from_mut(v).cast::<c_void>());
        let (stream, blocks) = (stream.as_ptr().cast(), (a.bytes / 4).div_ceil(256).min(264) as u32);
        let arguments = arguments.as_mut_ptr();
        // SAFETY: the kernel's four arguments, over memory that the test keeps until the stream is done.
        let queued = unsafe {
            sys::cuLaunchKernel(self.kernel, blocks, 1, 1, 256, 1, 1, 0, stream, arguments, std::ptr::null_mut())
        };
        assert_eq!(queued, sys::CUresult::CUDA_SUCCESS);
    }

    /// Words that differed so far, after all work queued on the device.
    pub fn count(&self) -> u32 {
        u32::from_le_bytes(self.count.read().try_into().unwrap())
    }
}
