//! `cargo xtask ratchet`: instruction counts of the shipped PTX, frozen in xtask/ratchet.json.

use crate::place;
use anyhow::{Context, Result, bail};
use gqa_kernels::registry;
use gqa_ptx::{Manifest, Ratchet, inspect};

/// The most lines of an error, so that its beginning stays visible.
const MOST_LINES: usize = 60;

pub fn run(bless: bool) -> Result<()> {
    let now = shipped()?;
    let entries = now.entries().count();
    refuse(rules(&now), "hot entries break rules that --bless does not override")?;
    let differences = Ratchet::read(&place::ratchet())?.differences(&now);
    if bless {
        differences.iter().for_each(|line| println!("{line}"));
        println!("{entries} entries, {} counts changed", differences.len());
        return Ok(now.write(&place::ratchet())?);
    }
    refuse(
        differences,
        "instruction counts differ from xtask/ratchet.json; if they should, run `cargo xtask \
         ratchet --bless`",
    )?;
    println!("{entries} entries, every count as frozen");
    Ok(())
}

fn shipped() -> Result<Ratchet> {
    let manifest = Manifest::read(&place::manifest())?;
    let mut ratchet = Ratchet::default();
    for module in &manifest.modules {
        ratchet.add(&module.name(), &module.read(&place::shipped())?);
    }
    ratchet.entries().next().context("no PTX is shipped; run `cargo xtask ptx`")?;
    Ok(ratchet)
}

/// Counts that must be zero in hot entries: local memory, calls, generic memory accesses.
fn rules(ratchet: &Ratchet) -> Vec<String> {
    let forbidden = |name: &str| {
        name == inspect::LOCAL_BYTES || name.starts_with("call") || inspect::is_generic_access(name)
    };
    let hot = ratchet
        .entries()
        .filter(|(_, entry, _)| registry::find(entry).is_some_and(|entry| entry.hot));
    hot.flat_map(|(module, entry, counts)| {
        let broken = counts.iter().filter(|(name, _)| forbidden(name));
        broken.map(move |(name, n)| format!("{module} {entry}: {name} {n}"))
    })
    .collect()
}

fn refuse(lines: Vec<String>, what: &str) -> Result<()> {
    if lines.is_empty() {
        return Ok(());
    }
    let more = lines.len().saturating_sub(MOST_LINES);
    let more = if more > 0 { format!("\n  and {more} more") } else { String::new() };
    bail!("{what}:\n  {}{more}", lines[..lines.len().min(MOST_LINES)].join("\n  "))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn hot_entries_may_not_use_local_memory_calls_or_generic_accesses() {
        let Some(hot) = registry::entries().find(|entry| entry.hot) else { return };
        let ptx = |body: &str, name: &str| format!(".visible .entry {name}()\n{{\n{body}\n}}\n");
        let broken = |body: &str, name: &str| {
            let mut ratchet = Ratchet::default();
            ratchet.add("m", &ptx(body, name));
            rules(&ratchet).len()
        };
        for body in
            [".local .align 4 .b8 __local_depot0[64];", "call.uni f, ();", "ld.b32 %r1, [%rd1];"]
        {
            assert_eq!((broken(body, hot.name), broken(body, "unknown")), (1, 0), "{body}");
        }
        assert_eq!(broken("ld.global.b32 %r1, [%rd1];", hot.name), 0);
    }
}
