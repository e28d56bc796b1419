//! What a slice has to do, on any libcuda: that of a card, or the tests' own.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;

use cudarc::driver::sys::{self, CUresult};
use cudarc::driver::{
    CudaContext, CudaFunction, CudaSlice, CudaStream, DevicePtr, DevicePtrMut, DeviceSlice,
    DriverError, LaunchConfig, PushKernelArg,
};
use cudarc::nvrtc::Ptx;
use vramp_alloc::device::CudaDriver;
use vramp_cudarc::{
    AdoptError, AllocError, Allocator, Bytes, Config, OpenError, Pool, SliceError, VrampSlice,
};

/// Elements of the slices that kernels work on.
const COUNT: usize = 1 << 16;
/// Clocks that a late kernel spins before it works: some milliseconds.
const LATE: u64 = 20_000_000;

/// Copies `n` words once it has spun for some clocks.
const KERNEL: &str = "
.version 7.0
.target sm_70
.address_size 64
.visible .entry copy_late(.param .u64 to, .param .u64 from, .param .u64 n, .param .u64 cycles)
{
    .reg .pred %p<3>;
    .reg .b32 %r<6>;
    .reg .b64 %rd<12>;
    ld.param.u64 %rd1, [to];
    ld.param.u64 %rd2, [from];
    ld.param.u64 %rd3, [n];
    ld.param.u64 %rd4, [cycles];
    cvta.to.global.u64 %rd1, %rd1;
    cvta.to.global.u64 %rd2, %rd2;
    mov.u64 %rd5, %clock64;
spin:
    mov.u64 %rd6, %clock64;
    sub.u64 %rd7, %rd6, %rd5;
    setp.lt.u64 %p1, %rd7, %rd4;
    @%p1 bra spin;
    mov.u32 %r1, %ctaid.x;
    mov.u32 %r2, %ntid.x;
    mov.u32 %r3, %tid.x;
    mad.lo.u32 %r4, %r1, %r2, %r3;
    cvt.u64.u32 %rd8, %r4;
    setp.ge.u64 %p2, %rd8, %rd3;
    @%p2 bra done;
    shl.b64 %rd9, %rd8, 2;
    add.u64 %rd10, %rd2, %rd9;
    ld.global.u32 %r5, [%rd10];
    add.u64 %rd11, %rd1, %rd9;
    st.global.u32 [%rd11], %r5;
done:
    ret;
}";

/// Checks by name, for every libcuda.
pub const CHECKS: &[(&str, fn())] = &[
    ("copies go both ways and between owners", copies),
    ("views are those of cudarc", views),
    ("kernels take slices and views", kernels),
    ("a slice is lent as cudarc's own, and goes where its traits are asked for", lending),
    ("another stream reads what a stream writes", writes_are_awaited),
    ("a drop is ordered behind a read on another stream", drop_behind_a_read),
    ("a drop is ordered behind a write on another stream", drop_behind_a_write),
    ("a drop is ordered behind a stream that was dropped", drop_behind_an_ended_stream),
    ("the first use on another stream is ordered behind the allocation", first_use_elsewhere),
    ("a use is recorded by hand where cudarc tracks none", uses_by_hand),
    ("a slice that was used while nothing was tracked is tracked later", tracked_later),
    ("slices of no elements have addresses", empty_slices),
    ("impossible lengths are errors with their values", impossible_lengths),
    ("contexts and streams of others are refused", foreign_contexts),
    ("a closed pool makes no slices, and those it made live on", closed_pool),
    ("ten thousand streams leave nothing", many_streams),
    ("threads share a pool, and slices move between them", threads),
    ("blocks become slices and slices blocks", blocks),
    ("an error that cudarc kept is neither lost nor a panic", kept_errors),
    ("a copy that fails leaves no block behind", failed_copies),
    ("copies from and to pinned memory", pinned_memory),
    ("a pool that is dropped gives its memory back", memory_comes_back),
];

/// A context of its own, which counts its own streams, with a pool.
pub struct Rig {
    pub context: Arc<CudaContext>,
    pub pool: Pool,
    copy_late: CudaFunction,
}

impl Rig {
    pub fn new() -> Rig {
        let context = CudaContext::new(0).unwrap();
        let pool = Pool::new(&context, Config::default()).unwrap();
        let module = context.load_module(Ptx::from_src(KERNEL)).unwrap();
        let copy_late = module.load_function("copy_late").unwrap();
        Rig { context, pool, copy_late }
    }

    pub fn stream(&self) -> Arc<CudaStream> {
        self.context.new_stream().unwrap()
    }

    /// Returns a slice of `COUNT` times this number, which is written.
    pub fn filled(&self, stream: &Arc<CudaStream>, with: u32) -> VrampSlice<u32> {
        let slice = self.pool.clone_htod(stream, &vec![with; COUNT]).unwrap();
        stream.synchronize().unwrap();
        slice
    }

    /// Queues a kernel on `stream` that copies one slice to another, late.
    pub fn copy_late(&self, stream: &CudaStream, from: &VrampSlice<u32>, to: &mut VrampSlice<u32>) {
        let mut launch = stream.launch_builder(&self.copy_late);
        launch.arg(to).arg(from).arg(&COUNT).arg(&LATE);
        // SAFETY: the kernel takes two addresses of `COUNT` words, their number and a number of clocks.
        unsafe { launch.launch(LaunchConfig::for_num_elems(COUNT as u32)) }.unwrap();
    }

    /// Allocates on `stream` what was freed there last, and overwrites it.
    pub fn overwrite(&self, stream: &Arc<CudaStream>, at: u64) -> VrampSlice<u32> {
        // SAFETY: it is filled below.
        let mut slice = unsafe { self.pool.alloc::<u32>(stream, COUNT) }.unwrap();
        assert_eq!(slice.block().addr().number(), at, "the memory is used again");
        stream.memset_zeros(&mut slice).unwrap();
        slice
    }
}

fn addr<T>(slice: &VrampSlice<T>) -> u64 {
    slice.block().addr().number()
}

fn all_are(stream: &Arc<CudaStream>, slice: &VrampSlice<u32>, what: u32) {
    let contents = stream.clone_dtoh(slice).unwrap();
    stream.synchronize().unwrap();
    assert_eq!(contents.len(), COUNT);
    assert!(contents.iter().all(|&it| it == what), "{what}: {:?}", &contents[..4]);
}

fn copies() {
    let rig = Rig::new();
    let stream = rig.stream();
    let numbers: Vec<f32> = (0..1000).map(|it| it as f32).collect();
    let slice = rig.pool.clone_htod(&stream, &numbers).unwrap();
    assert_eq!((slice.len(), slice.num_bytes(), slice.ordinal()), (1000, 4000, 0));
    assert_eq!(stream.clone_dtoh(&slice).unwrap(), numbers);
    assert_eq!(stream.clone_dtoh(&slice.clone()).unwrap(), numbers);
    let zeros = rig.pool.alloc_zeros::<f32>(&stream, 1000).unwrap();
    assert_eq!(stream.clone_dtoh(&zeros).unwrap(), [0.0; 1000]);
    // cudarc's own memory, and back.
    let mut theirs: CudaSlice<f32> = stream.clone_dtod(&slice).unwrap();
    assert_eq!(stream.clone_dtoh(&theirs).unwrap(), numbers);
    let mut ours = rig.pool.clone_dtod(&stream, &theirs).unwrap();
    assert_eq!(stream.clone_dtoh(&ours).unwrap(), numbers);
    stream.memcpy_dtod(&zeros, &mut theirs).unwrap();
    stream.memcpy_dtod(&theirs, &mut ours).unwrap();
    assert_eq!(stream.clone_dtoh(&ours).unwrap(), [0.0; 1000]);
    stream.memcpy_htod(&[7.0, 8.0], &mut ours).unwrap();
    let mut front = [0.0; 2];
    stream.memcpy_dtoh(&ours.slice(..2), &mut front).unwrap();
    stream.synchronize().unwrap();
    assert_eq!(front, [7.0, 8.0]);
    drop((slice, zeros, ours));
    assert_eq!(rig.pool.allocator().live(), Bytes::ZERO);
    rig.pool.allocator().audit().unwrap();
}

fn views() {
    let rig = Rig::new();
    let stream = rig.stream();
    let numbers: Vec<u32> = (0..100).collect();
    let mut slice = rig.pool.clone_htod(&stream, &numbers).unwrap();
    assert_eq!(stream.clone_dtoh(&slice.slice(10..20)).unwrap(), numbers[10..20]);
    assert_eq!(stream.clone_dtoh(&slice.as_view()).unwrap(), numbers);
    assert!(slice.try_slice(90..=100).is_none() && slice.try_slice(100..).is_some());
    let (left, right) = slice.split_at(30);
    assert_eq!((left.len(), stream.clone_dtoh(&right).unwrap()), (30, numbers[30..].to_vec()));
    assert!(slice.try_split_at(101).is_none() && slice.try_split_at_mut(101).is_none());
    assert!(slice.try_slice_mut(101..).is_none());
    let (mut left, mut right) = slice.split_at_mut(50);
    stream.memset_zeros(&mut left).unwrap();
    stream.memcpy_dtod(&left, &mut right).unwrap();
    assert_eq!(stream.clone_dtoh(&slice).unwrap(), [0; 100]);
    stream.memcpy_htod(&[1, 2, 3], &mut slice.slice_mut(97..)).unwrap();
    stream.memcpy_htod(&[4], &mut slice.try_slice_mut(..1).unwrap()).unwrap();
    let contents = stream.clone_dtoh(&slice).unwrap();
    assert_eq!((contents[0], &contents[96..]), (4, &[0, 1, 2, 3][..]));
    // SAFETY: any bytes are bytes, and any four are a number.
    let bytes = unsafe { slice.transmute::<u8>(400) }.unwrap();
    assert_eq!(stream.clone_dtoh(&bytes.slice(..4)).unwrap(), [4, 0, 0, 0]);
    // SAFETY: as above.
    assert!(unsafe { slice.transmute_mut::<u8>(401) }.is_none());
    // SAFETY: as above.
    let mut bytes = unsafe { slice.transmute_mut::<u8>(400) }.unwrap();
    stream.memset_zeros(&mut bytes).unwrap();
    stream.memset_zeros(&mut slice.as_view_mut()).unwrap();
    assert_eq!(stream.clone_dtoh(&slice).unwrap(), [0; 100]);
    let panicked = catch_unwind(AssertUnwindSafe(|| slice.slice_mut(101..).len()));
    assert!(panicked.is_err());
}

fn kernels() {
    let rig = Rig::new();
    let stream = rig.context.default_stream();
    let (from, mut to) = (rig.filled(&stream, 5), rig.filled(&stream, 6));
    rig.copy_late(&stream, &from, &mut to);
    all_are(&stream, &to, 5);
    // Views of both, with one word between them that stays.
    let mut slice = rig.pool.clone_htod(&stream, &[1u32, 2, 3, 4, 5]).unwrap();
    let (left, mut right) = slice.split_at_mut(3);
    let left = left.slice(..2);
    let mut launch = stream.launch_builder(&rig.copy_late);
    launch.arg(&mut right).arg(&left).arg(&2usize).arg(&0u64);
    // SAFETY: the kernel takes two addresses of two words, their number and a number of clocks.
    unsafe { launch.launch(LaunchConfig::for_num_elems(2)) }.unwrap();
    assert_eq!(stream.clone_dtoh(&slice).unwrap(), [1, 2, 3, 1, 2]);
}

/// As libraries such as cuBLAS take their operands.
fn as_a_library<A: DevicePtr<u32>, C: DevicePtrMut<u32>>(
    stream: &Arc<CudaStream>,
    a: &A,
    c: &mut C,
) {
    let bytes = a.num_bytes();
    let (from, _read) = a.device_ptr(stream);
    let (to, _written) = c.device_ptr_mut(stream);
    // SAFETY: both are as long, and the guards are dropped after the copy is queued.
    unsafe { cudarc::driver::result::memcpy_dtod_async(to, from, bytes, stream.cu_stream()) }
        .unwrap();
}

fn lending() {
    fn is_shared<T: Send + Sync>(_: &T) {}
    fn first(stream: &Arc<CudaStream>, slice: &CudaSlice<u32>) -> u32 {
        stream.clone_dtoh(&slice.slice(..1)).unwrap()[0]
    }
    let rig = Rig::new();
    let stream = rig.stream();
    is_shared(&rig.pool);
    let (from, mut to) = (rig.filled(&stream, 9), rig.filled(&stream, 0));
    is_shared(&from);
    as_a_library(&stream, &from, &mut to);
    assert_eq!((first(&stream, &from), first(&stream, &to)), (9, 9));
    assert!(Arc::ptr_eq(DeviceSlice::stream(&to), &stream) && *to.context() == rig.context);
    // Uses as cudarc's slice and as ours are one order of uses.
    let other = rig.stream();
    let zero = rig.filled(&stream, 0);
    rig.copy_late(&stream, &zero, &mut to);
    assert_eq!(first(&other, &to), 0);
}

fn writes_are_awaited() {
    let rig = Rig::new();
    let (one, two) = (rig.stream(), rig.stream());
    let (from, mut to) = (rig.filled(&one, 1), rig.filled(&one, 2));
    rig.copy_late(&one, &from, &mut to);
    all_are(&two, &to, 1);
    // And what one reads late is not written before.
    let zeros = rig.filled(&one, 0);
    let mut from = from;
    rig.copy_late(&one, &from, &mut to);
    two.memcpy_dtod(&zeros, &mut from).unwrap();
    all_are(&one, &to, 1);
    all_are(&two, &from, 0);
}

fn drop_behind_a_read() {
    let rig = Rig::new();
    let (one, two) = (rig.stream(), rig.stream());
    let (from, mut to) = (rig.filled(&one, 3), rig.filled(&two, 4));
    rig.copy_late(&two, &from, &mut to);
    let at = addr(&from);
    drop(from);
    let _over = rig.overwrite(&one, at);
    all_are(&two, &to, 3);
}

fn drop_behind_a_write() {
    let rig = Rig::new();
    let (one, two) = (rig.stream(), rig.stream());
    let (from, mut to) = (rig.filled(&two, 3), rig.filled(&one, 4));
    rig.copy_late(&two, &from, &mut to);
    let at = addr(&to);
    drop(to);
    let over = rig.overwrite(&one, at);
    all_are(&one, &over, 0);
}

fn drop_behind_an_ended_stream() {
    let rig = Rig::new();
    let own = rig.context.default_stream();
    let (from, mut to) = (rig.filled(&own, 3), rig.filled(&own, 4));
    let two = rig.stream();
    rig.copy_late(&two, &from, &mut to);
    drop(two);
    assert!(!rig.context.is_in_multi_stream_mode(), "cudarc waits for nothing from here on");
    let (read, written) = (addr(&from), addr(&to));
    drop(from);
    let _over = rig.overwrite(&own, read);
    all_are(&own, &to, 3);
    let from = rig.filled(&own, 8);
    let two = rig.stream();
    rig.copy_late(&two, &from, &mut to);
    drop((two, to));
    let over = rig.overwrite(&own, written);
    all_are(&own, &over, 0);
}

fn first_use_elsewhere() {
    let rig = Rig::new();
    let (one, two) = (rig.stream(), rig.stream());
    let (from, mut to) = (rig.filled(&one, 3), rig.filled(&one, 4));
    rig.copy_late(&one, &from, &mut to);
    let at = addr(&to);
    drop(to);
    // SAFETY: it is written before it is read.
    let mut again = unsafe { rig.pool.alloc::<u32>(&one, COUNT) }.unwrap();
    assert_eq!(addr(&again), at);
    two.memcpy_htod(&vec![7; COUNT], &mut again).unwrap();
    one.synchronize().unwrap();
    all_are(&two, &again, 7);
}

fn uses_by_hand() {
    let rig = Rig::new();
    // SAFETY: uses on several streams are ordered and recorded by hand below.
    unsafe { rig.context.disable_event_tracking() };
    let (one, two) = (rig.stream(), rig.stream());
    let (from, mut to) = (rig.filled(&one, 3), rig.filled(&two, 4));
    let at = addr(&from);
    rig.copy_late(&two, &from, &mut to);
    rig.pool.record_use(&from, &two).unwrap();
    drop(from);
    // SAFETY: it is filled below.
    let mut other = unsafe { rig.pool.alloc::<u32>(&one, COUNT) }.unwrap();
    assert_ne!(addr(&other), at, "the memory is still in use");
    one.memset_zeros(&mut other).unwrap();
    all_are(&two, &to, 3);
    // On its own stream no use has to be recorded.
    let from = rig.filled(&one, 6);
    rig.copy_late(&one, &from, &mut other);
    let at = addr(&from);
    drop(from);
    let _over = rig.overwrite(&one, at);
    all_are(&one, &other, 6);
    let foreign = Pool::new(&rig.context, Config::default()).unwrap();
    assert!(matches!(foreign.record_use(&other, &one), Err(SliceError::Use(_))));
}

fn tracked_later() {
    let rig = Rig::new();
    let (one, two) = (rig.stream(), rig.stream());
    // SAFETY: nothing is used on several streams until tracking is on again.
    unsafe { rig.context.disable_event_tracking() };
    let (from, mut to) = (rig.filled(&one, 3), rig.filled(&two, 4));
    all_are(&one, &from, 3);
    // SAFETY: turning it on has no requirement that is not met.
    unsafe { rig.context.enable_event_tracking() };
    rig.copy_late(&two, &from, &mut to);
    let at = addr(&from);
    drop(from);
    let _over = rig.overwrite(&one, at);
    all_are(&one, &to, 3);
}

fn empty_slices() {
    let rig = Rig::new();
    let stream = rig.stream();
    // SAFETY: there is nothing to write.
    let empty = unsafe { rig.pool.alloc::<f64>(&stream, 0) }.unwrap();
    let zeros = rig.pool.alloc_zeros::<f64>(&stream, 0).unwrap();
    let copied = rig.pool.clone_htod::<f64, [f64]>(&stream, &[]).unwrap();
    let cloned = rig.pool.clone_dtod(&stream, &copied).unwrap();
    let mut ats = [&empty, &zeros, &copied, &cloned].map(addr);
    ats.sort_unstable();
    assert!(ats[0] != 0 && ats.windows(2).all(|pair| pair[0] < pair[1]), "{ats:?}");
    assert!(empty.is_empty() && zeros.slice(..).is_empty() && cloned.clone().is_empty());
    assert_eq!((empty.len(), empty.num_bytes()), (0, 0));
    drop((empty, zeros, copied, cloned));
    assert_eq!(rig.pool.allocator().live(), Bytes::ZERO);
}

fn impossible_lengths() {
    let rig = Rig::new();
    let stream = rig.stream();
    let too_long = rig.pool.alloc_zeros::<u64>(&stream, usize::MAX / 4).unwrap_err();
    assert!(matches!(too_long, SliceError::TooLong { size: 8, .. }), "{too_long}");
    for len in [usize::MAX, usize::MAX / 2, 1 << 50] {
        let short = rig.pool.alloc_zeros::<u8>(&stream, len).unwrap_err();
        assert!(matches!(short, SliceError::Alloc(AllocError::OutOfMemory(_))), "{short}");
    }
    assert_eq!(rig.pool.allocator().live(), Bytes::ZERO);
    drop(rig.pool.alloc_zeros::<u8>(&stream, 1 << 20).unwrap());
}

fn foreign_contexts() {
    let rig = Rig::new();
    let mut raw = std::ptr::null_mut();
    let device = rig.context.cu_device();
    // SAFETY: `raw` outlives the call, and null means no parameters.
    unsafe { sys::cuCtxCreate_v4(&mut raw, std::ptr::null_mut(), 0, device) }.result().unwrap();
    // SAFETY: the context was created above, and is given away.
    let other = unsafe { CudaContext::from_raw_context(0, device, raw) }.unwrap();
    let refused = Pool::new(&other, Config::default()).unwrap_err();
    assert!(matches!(refused, OpenError::NotPrimary { ordinal: 0 }), "{refused}");
    for stream in [other.default_stream(), other.new_stream().unwrap()] {
        let refused = rig.pool.alloc_zeros::<u8>(&stream, 8).unwrap_err();
        assert!(matches!(refused, SliceError::OtherContext { stream: 0, pool: 0 }), "{refused}");
    }
    let refused = rig.pool.alloc_zeros::<u8>(&rig.context.per_thread_stream(), 8).unwrap_err();
    assert!(matches!(refused, SliceError::PerThread), "{refused}");
    assert_eq!(rig.pool.streams(), 0);
    // Another handle of the primary context is the same context.
    let same = CudaContext::new(0).unwrap().new_stream().unwrap();
    drop(rig.pool.alloc_zeros::<u8>(&same, 8).unwrap());
    let card = Arc::new(CudaDriver::open(0).unwrap());
    let elsewhere = Arc::clone(rig.pool.allocator());
    let refused = Pool::of(&rig.context, card.clone(), elsewhere).unwrap_err();
    assert!(matches!(refused, OpenError::OtherCard { context: 0, .. }), "{refused}");
    let allocator = Arc::new(Allocator::new(card.clone(), Config::default()).unwrap());
    let pool = Pool::of(&rig.context, card, Arc::clone(&allocator)).unwrap();
    let slice = pool.alloc_zeros::<u8>(&rig.context.default_stream(), 8).unwrap();
    assert_eq!((allocator.live(), slice.len()), (Bytes::new(8), 8));
}

fn closed_pool() {
    let rig = Rig::new();
    let (stream, default) = (rig.stream(), rig.context.default_stream());
    let slice = rig.filled(&stream, 5);
    let allocator = Arc::downgrade(rig.pool.allocator());
    let pool = rig.pool.clone();
    pool.close();
    for stream in [&stream, &default] {
        let refused = rig.pool.alloc_zeros::<u8>(stream, 8).unwrap_err();
        assert!(matches!(refused, SliceError::Closed), "{refused}");
    }
    assert_eq!(rig.pool.streams(), 0);
    all_are(&stream, &slice, 5);
    let Rig { pool: first, .. } = rig;
    drop((pool, first));
    // Without its pool it is copied, used and freed as before.
    let copy = slice.clone();
    drop(slice);
    all_are(&stream, &copy, 5);
    assert!(allocator.upgrade().is_some_and(|it| it.live() == copy.block().len()));
    drop(copy);
    assert!(allocator.upgrade().is_none());
    assert_eq!(Arc::strong_count(&stream), 1);
}

fn many_streams() {
    let rig = Rig::new();
    let reserved = || rig.pool.allocator().reserved();
    let mut first = None;
    for _ in 0..10_000 {
        let stream = rig.stream();
        let slice = rig.pool.alloc_zeros::<u8>(&stream, 100_000).unwrap();
        drop(stream);
        drop(slice);
        assert!(rig.pool.streams() <= 2);
        rig.context.synchronize().unwrap();
        first.get_or_insert_with(reserved);
    }
    assert!(rig.context.is_in_multi_stream_mode());
    rig.pool.forget_dropped();
    assert_eq!(rig.pool.streams(), 0);
    assert!(!rig.context.is_in_multi_stream_mode(), "cudarc destroyed the last one");
    assert!(reserved().count() <= first.unwrap().count() * 8, "{:?}, then {}", first, reserved());
    // A stream that is held stays, and one that is forgotten is registered again.
    let stream = rig.stream();
    drop(rig.pool.alloc_zeros::<u8>(&stream, 8).unwrap());
    assert_eq!((rig.pool.forget_dropped(), rig.pool.streams()), (0, 1));
    assert!(rig.pool.forget(&stream) && !rig.pool.forget(&stream));
    let id = rig.pool.stream_id(&stream).unwrap();
    assert_eq!(rig.pool.stream_id(&stream).unwrap(), id);
    // The default stream is one, however often cudarc wraps it.
    let default = || rig.pool.stream_id(&rig.context.default_stream()).unwrap();
    let id = default();
    for _ in 0..10 {
        assert_eq!(default(), id);
        // The stream may be where that wrapper was, and its registration is when dropped ones are looked for.
        assert_ne!(rig.pool.stream_id(&rig.stream()).unwrap(), id);
    }
    rig.pool.allocator().audit().unwrap();
}

fn threads() {
    let rig = Rig::new();
    let (sender, receiver) = std::sync::mpsc::channel();
    std::thread::scope(|scope| {
        for number in 0..4u32 {
            let (rig, sender) = (&rig, sender.clone());
            scope.spawn(move || {
                let stream = rig.stream();
                for round in 0..50 {
                    let slice = rig.filled(&stream, number * 100 + round);
                    let copy = slice.clone();
                    drop(slice);
                    sender.send((number * 100 + round, copy)).unwrap();
                }
            });
        }
        drop(sender);
        let stream = rig.stream();
        for (what, slice) in receiver {
            all_are(&stream, &slice, what);
        }
    });
    assert_eq!(rig.pool.allocator().live(), Bytes::ZERO);
    rig.pool.allocator().audit().unwrap();
}

fn blocks() {
    let rig = Rig::new();
    let (one, two) = (rig.stream(), rig.stream());
    let (from, mut to) = (rig.filled(&one, 3), rig.filled(&two, 4));
    rig.copy_late(&two, &from, &mut to);
    let block = from.into_block();
    assert_eq!(rig.pool.allocator().live(), block.len() + to.block().len());
    // SAFETY: `one` is ordered behind the block's uses, and its words were written.
    let mut back = unsafe { rig.pool.adopt::<u32>(&one, block, COUNT) }.unwrap();
    one.memset_zeros(&mut back).unwrap();
    all_are(&two, &to, 3);
    let other = Pool::new(&rig.context, Config::default()).unwrap();
    let block = back.into_block();
    // SAFETY: it is refused.
    let refused = unsafe { other.adopt::<u32>(&one, block, COUNT) }.unwrap_err();
    let AdoptError { block, error: SliceError::ForeignBlock } = refused else {
        panic!("{refused}")
    };
    // SAFETY: it is refused.
    let refused = unsafe { rig.pool.adopt::<u32>(&one, block, COUNT + 1) }.unwrap_err();
    let AdoptError { block, error: SliceError::ShortBlock { len, needed } } = refused else {
        panic!("{refused}")
    };
    assert_eq!((len, needed.count()), (block.len(), COUNT as u64 * 4 + 4));
    let elsewhere = rig.context.per_thread_stream();
    // SAFETY: it is refused.
    let refused = unsafe { rig.pool.adopt::<u32>(&elsewhere, block, COUNT) }.unwrap_err();
    let AdoptError { block, error: SliceError::PerThread } = refused else { panic!("{refused}") };
    rig.pool.allocator().free(block, rig.pool.stream_id(&one).unwrap()).unwrap();
    drop(to);
    assert_eq!(rig.pool.allocator().live(), Bytes::ZERO);
}

fn kept_errors() {
    let rig = Rig::new();
    let stream = rig.stream();
    let slice = rig.filled(&stream, 1).clone();
    stream.synchronize().unwrap();
    // SAFETY: it is not read.
    let fresh = unsafe { rig.pool.alloc::<u32>(&stream, 4) }.unwrap();
    let planted = DriverError(CUresult::CUDA_ERROR_FILE_NOT_FOUND);
    rig.context.record_err::<()>(Err(planted));
    assert_eq!(fresh.as_view().len(), 4);
    assert_eq!(rig.context.check_err(), Err(planted));
    rig.context.record_err::<()>(Err(planted));
    let refused = rig.pool.alloc_zeros::<u32>(&stream, 4).unwrap_err();
    assert!(matches!(refused, SliceError::Cuda(error) if error == planted), "{refused}");
    all_are(&stream, &slice, 1);
}

fn failed_copies() {
    let rig = Rig::new();
    let stream = rig.stream();
    let slice = rig.filled(&stream, 1);
    let live = rig.pool.allocator().live();
    rig.context.record_err::<()>(Err(DriverError(CUresult::CUDA_ERROR_FILE_NOT_FOUND)));
    assert!(slice.try_clone().is_err());
    rig.context.record_err::<()>(Err(DriverError(CUresult::CUDA_ERROR_FILE_NOT_FOUND)));
    assert!(rig.pool.clone_htod(&stream, &[1, 2, 3]).is_err());
    assert_eq!(rig.pool.allocator().live(), live);
}

fn pinned_memory() {
    let rig = Rig::new();
    let stream = rig.stream();
    // SAFETY: it is written before it is read.
    let mut host = unsafe { rig.context.alloc_pinned::<u32>(1000) }.unwrap();
    // SAFETY: nothing else uses it.
    unsafe { std::slice::from_raw_parts_mut(host.as_mut_ptr().unwrap(), 1000) }.fill(7);
    let slice = rig.pool.clone_htod(&stream, &host).unwrap();
    assert_eq!(stream.clone_dtoh(&slice).unwrap(), [7; 1000]);
    let zeros = rig.pool.alloc_zeros::<u32>(&stream, 1000).unwrap();
    stream.memcpy_dtoh(&zeros, &mut host).unwrap();
    assert_eq!(host.as_slice().unwrap(), [0; 1000]);
}

fn memory_comes_back() {
    let rig = Rig::new();
    let stream = rig.stream();
    let free = || rig.context.mem_get_info().unwrap().0;
    let before = free();
    let slice = rig.pool.alloc_zeros::<u8>(&stream, 1 << 28).unwrap();
    assert!(free() + (1 << 28) <= before);
    rig.pool.close();
    let Rig { pool, context, .. } = rig;
    drop((pool, slice));
    context.synchronize().unwrap();
    let after = context.mem_get_info().unwrap().0;
    assert!(after + (16 << 20) > before, "{after} of {before}");
}

/// Loses the device, so it is the last that a process does. Errors are typed, and drops go on.
pub fn lost_device() {
    let rig = Rig::new();
    let (stream, other) = (rig.stream(), rig.stream());
    let (from, mut to) = (rig.filled(&stream, 1), rig.filled(&other, 2));
    rig.copy_late(&other, &from, &mut to);
    // SAFETY: it is never used.
    let unused = unsafe { rig.pool.alloc::<u32>(&stream, COUNT) }.unwrap();
    let mut launch = stream.launch_builder(&rig.copy_late);
    launch.arg(&mut to).arg(&8u64).arg(&COUNT).arg(&0u64);
    // SAFETY: it is not safe, which is what the device is lost by.
    let launched = unsafe { launch.launch(LaunchConfig::for_num_elems(COUNT as u32)) };
    let lost = launched.map(|_| ()).and_then(|()| stream.synchronize()).unwrap_err();
    assert_eq!(lost, DriverError(CUresult::CUDA_ERROR_ILLEGAL_ADDRESS));
    for _ in 0..2 {
        let refused = rig.pool.alloc_zeros::<u32>(&stream, COUNT).unwrap_err();
        assert!(matches!(refused, SliceError::Cuda(_) | SliceError::Alloc(_)), "{refused}");
        assert!(rig.pool.clone_htod(&stream, &[1]).is_err() && from.try_clone().is_err());
    }
    drop((from, to, unused));
    rig.pool.forget(&other);
    drop((rig, stream, other));
}
