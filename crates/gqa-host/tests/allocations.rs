//! A step with a known shape allocates no host memory: neither its plan nor, with a GPU, its
//! launches.

#[allow(dead_code, reason = "each test uses a part")]
#[path = "suite/step/mod.rs"]
mod step;

use gqa_host::plan::{DeviceInfo, PlanOptions, Planner};
use gqa_host::{DType, Problem};
use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;
use step::Step;

/// The system's allocator, counting.
struct Counting;

thread_local! {
    static ALLOCATIONS: Cell<usize> = const { Cell::new(0) };
}

// SAFETY: the system's allocator does everything.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        ALLOCATIONS.set(ALLOCATIONS.get() + 1);
        // SAFETY: the caller's.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
        // SAFETY: the caller's.
        unsafe { System.dealloc(pointer, layout) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

/// What this thread allocates in `work`.
fn allocations(work: impl FnOnce()) -> usize {
    let before = ALLOCATIONS.get();
    work();
    ALLOCATIONS.get() - before
}

fn problem(total: i32) -> Problem {
    Step::new(DType::F16, 1, &[total, 7], total as usize).problem()
}

#[test]
fn allocations_are_counted() {
    assert_eq!(allocations(|| drop(std::hint::black_box(vec![1u8; 7]))), 1);
}

#[test]
fn a_plan_that_was_made_before_is_found() {
    let planner = Planner::new(DeviceInfo::h200(), PlanOptions::default());
    let (first, later) = (problem(150), problem(200));
    assert!(allocations(|| drop(planner.plan(&first))) > 0);
    assert_eq!(allocations(|| drop(planner.plan(&first))), 0);
    assert_eq!(allocations(|| drop(planner.plan(&later))), 0);
}

#[cfg(feature = "cuda")]
#[test]
#[ignore = "needs a GPU"]
fn a_call_is_put_into_the_stream() {
    use gqa_host::driver::{Call, Device, Stream};
    let device = Device::open(0).expect("a GPU");
    let stream = Stream::new(&device).unwrap();
    let planner = Planner::new(device.info().clone(), PlanOptions::default());
    for rows in [1, 100] {
        let step = Step::new(DType::F16, rows, &[200, 150], 200);
        let plan = planner.plan(&step.problem()).unwrap();
        let calls = [(); 2].map(|()| Call::new(&device, plan.clone()).unwrap());
        calls.iter().for_each(|call| call.poison(&stream).unwrap());
        let mut recording = device.load(plan).unwrap().record().unwrap();
        let mut enqueue = || {
            for call in &calls {
                call.enqueue(&stream).unwrap();
                call.enqueue_recorded(&mut recording, &stream).unwrap();
            }
        };
        enqueue();
        assert_eq!(allocations(enqueue), 0, "{rows} rows");
        stream.synchronize().unwrap();
    }
}
