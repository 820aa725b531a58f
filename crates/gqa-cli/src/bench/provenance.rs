//! Where numbers come from.

use std::process::Command;
use std::time::{SystemTime, UNIX_EPOCH};

use serde::{Deserialize, Serialize};

use crate::backend::Machine;

/// What must be known to judge or repeat a measurement.
#[derive(Clone, Debug, Deserialize, Serialize)]
pub struct Provenance {
    /// This program.
    pub version: String,
    /// Its sources.
    pub commit: String,
    /// How it was started.
    pub command: String,
    /// When the run began.
    pub date: String,
    /// What computed.
    pub device: String,
    /// The NVIDIA driver, where a GPU computed.
    pub driver: Option<String>,
    /// Clocks and power of the GPU before and after the run, as the driver's tool says them.
    pub clocks: Vec<String>,
    /// Processor and threads.
    pub cpu: String,
    /// Operating system.
    pub system: String,
}

impl Provenance {
    /// Of a run that begins now.
    pub fn new(machine: &Machine, device: String) -> Self {
        let gpu = matches!(machine, Machine::Gpu(_));
        Self {
            version: env!("CARGO_PKG_VERSION").to_owned(),
            commit: env!("BUILD_COMMIT").to_owned(),
            command: command(),
            date: date(SystemTime::now()),
            device,
            driver: if gpu { query("driver_version") } else { None },
            clocks: if gpu { clocks().into_iter().collect() } else { Vec::new() },
            cpu: format!("{}, {} threads", processor(), rayon::current_num_threads()),
            system: format!("{} {}", std::env::consts::OS, std::env::consts::ARCH),
        }
    }

    /// Notes the clocks after the run.
    pub fn finish(&mut self) {
        if !self.clocks.is_empty() {
            self.clocks.extend(clocks());
        }
    }

    /// What computed, in a line.
    pub fn headline(&self) -> String {
        match self.driver {
            Some(_) => self.device.clone(),
            None => format!("{}; on {}", self.device, self.cpu),
        }
    }

    /// Name and value of everything that is known.
    pub fn lines(&self) -> Vec<(&'static str, String)> {
        let mut lines = vec![
            ("Device", self.device.clone()),
            ("CPU", self.cpu.clone()),
            ("System", self.system.clone()),
            ("Program", format!("gqa {}, commit {}", self.version, self.commit)),
            ("Command", self.command.clone()),
            ("Date", self.date.clone()),
        ];
        lines.extend(self.driver.clone().map(|driver| ("Driver", driver)));
        if !self.clocks.is_empty() {
            lines.push(("Clocks before, after", self.clocks.join(" | ")));
        }
        lines
    }
}

/// The program's name without its folder, and its arguments.
fn command() -> String {
    let words = std::env::args()
        .skip(1)
        .map(|word| if word.contains(char::is_whitespace) { format!("'{word}'") } else { word });
    std::iter::once("gqa".to_owned()).chain(words).collect::<Vec<_>>().join(" ")
}

fn clocks() -> Option<String> {
    query("clocks.sm,clocks.mem,power.draw,temperature.gpu")
}

/// Fields that nvidia-smi, which comes with the driver, reads without changing anything.
fn query(fields: &str) -> Option<String> {
    let fields = format!("--query-gpu={fields}");
    let output =
        Command::new("nvidia-smi").args([&fields, "--format=csv,noheader", "--id=0"]).output();
    let output = output.ok().filter(|output| output.status.success())?;
    Some(String::from_utf8_lossy(&output.stdout).trim().to_owned())
}

/// The processor's name where the system tells it.
fn processor() -> String {
    let text = std::fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    let name = text.lines().find_map(|line| line.strip_prefix("model name")?.split_once(": "));
    name.map_or(std::env::consts::ARCH, |(_, name)| name).to_owned()
}

/// UTC as ISO 8601 writes it.
fn date(time: SystemTime) -> String {
    let seconds = time.duration_since(UNIX_EPOCH).unwrap_or_default().as_secs();
    let (year, month, day) = civil(seconds / 86400);
    let (hour, minute) = (seconds / 3600 % 24, seconds / 60 % 60);
    format!("{year:04}-{month:02}-{day:02}T{hour:02}:{minute:02}Z")
}

/// Year, month and day of the day that many days after 1970-01-01.
fn civil(mut days: u64) -> (u64, u64, u64) {
    let leap = |year: u64| year % 4 == 0 && (year % 100 != 0 || year % 400 == 0);
    let mut year = 1970;
    while days >= 365 + u64::from(leap(year)) {
        days -= 365 + u64::from(leap(year));
        year += 1;
    }
    let february = 28 + u64::from(leap(year));
    let mut month = 1;
    for length in [31, february, 31, 30, 31, 30, 31, 31, 30, 31, 30, 31] {
        if days < length {
            break;
        }
        days -= length;
        month += 1;
    }
    (year, month, days + 1)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::Duration;

    #[test]
    fn dates_are_those_of_the_calendar() {
        for (seconds, want) in [
            (0, "1970-01-01T00:00Z"),
            (951_782_400, "2000-02-29T00:00Z"),
            (951_868_799, "2000-02-29T23:59Z"),
            (1_798_761_599, "2026-12-31T23:59Z"),
            (4_107_542_400, "2100-03-01T00:00Z"),
        ] {
            assert_eq!(date(UNIX_EPOCH + Duration::from_secs(seconds)), want);
        }
    }
}
