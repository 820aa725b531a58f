//! Runs jobs on all cores.

use rayon::prelude::*;
use std::cmp::Reverse;

/// Runs `work` on each of the jobs; returns the results in order. The most costly jobs start first,
/// so that none of them starts last.
pub fn longest_first<J: Send, R: Send>(
    jobs: Vec<J>,
    cost: impl Fn(&J) -> u64,
    work: impl Fn(J) -> R + Send + Sync,
) -> Vec<R> {
    let mut jobs: Vec<_> = jobs.into_iter().enumerate().collect();
    jobs.sort_by_key(|(_, job)| Reverse(cost(job)));
    let mut done: Vec<_> = jobs.into_iter().par_bridge().map(|(i, job)| (i, work(job))).collect();
    done.sort_by_key(|(i, _)| *i);
    done.into_iter().map(|(_, result)| result).collect()
}

/// Index of the worker thread.
pub fn worker() -> usize {
    rayon::current_thread_index().unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn results_are_in_the_order_of_the_jobs() {
        let jobs = vec![3, 1, 4, 1, 5, 9, 2, 6];
        assert_eq!(
            longest_first(jobs.clone(), |&job| job, |job| 10 * job),
            jobs.iter().map(|job| 10 * job).collect::<Vec<_>>()
        );
    }
}
