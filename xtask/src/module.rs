//! One PTX module: the entries of one family for one GPU, as the registry lists them.

use crate::{parallel, place};
use anyhow::{Context, Result, ensure};
use gqa_kernels::registry::{self, Entry, Family, Target};
use gqa_ptx::{Builder, Built, Toolchain, post};
use std::collections::BTreeSet;

/// What to build.
#[derive(Clone, Copy, Debug)]
pub struct Module {
    pub family: Family,
    pub target: Target,
}

impl Module {
    /// All that ship.
    pub fn all() -> impl Iterator<Item = Self> {
        let has_entries =
            |family: &Family| registry::entries().any(|entry| entry.family == *family);
        let families = Family::ALL.into_iter().filter(has_entries);
        families
            .flat_map(|family| family.targets().iter().map(move |&target| Self { family, target }))
    }

    /// Such as `tiled-masked`.
    pub fn family_name(self) -> &'static str {
        self.family.module()
    }

    /// Such as `tiled.sm_80`.
    pub fn name(self) -> String {
        format!("{}.{}", self.family_name(), self.target.arch)
    }

    /// Compiles the module and writes the registry's launch bounds into its PTX.
    pub fn build(self, toolchain: &Toolchain, quick: bool) -> Result<Built> {
        // Builds that share a folder wait for each other.
        let folder = place::target().join(format!("ptx/{}", parallel::worker()));
        let builder = Builder::new(toolchain, place::kernels(), folder);
        let module = format!("ptx_module=\"{}\"", self.target.module);
        // rustc does not know families of GPUs.
        let (arch, ptx) = (self.target.arch, self.target.ptx);
        let (cpu, own_ptx) = match arch.strip_suffix('f') {
            Some(oldest) => (format!("{oldest}a"), None),
            None => (arch.to_owned(), ptx),
        };
        let mut built = builder.build(&gqa_ptx::Target {
            name: &self.name(),
            features: if quick { &["quick"] } else { &[] },
            cfg: &[&module],
            cpu: &cpu,
            ptx: own_ptx,
        })?;
        if cpu != arch {
            built.ptx = post::set_target(&built.ptx, arch, ptx.context("a family's PTX")?)?;
        }
        let ptx = post::keep(&post::strip(&built.ptx), |name| self.runs(name));
        let (sm, _) = registry::number(self.target.arch);
        let ptx = post::lower_elements(&post::number_labels_alone(&ptx), sm);
        built.ptx = self.bounded(&ptx)?;
        ensure!(
            quick || self.missing(&built.ptx).is_empty(),
            "{}: the PTX lacks {:?}",
            self.name(),
            self.missing(&built.ptx)
        );
        Ok(built)
    }

    /// Whether the target has the features that a registry entry needs. Unknown features are an
    /// error later.
    fn runs(self, name: &str) -> bool {
        let (sm, _) = registry::number(self.target.arch);
        registry::find(name).is_none_or(|entry| entry.min_sm <= sm)
    }

    fn bounded(self, ptx: &str) -> Result<String> {
        post::entry_names(ptx).iter().try_fold(ptx.to_owned(), |text, name| {
            let entry = registry::find(name)
                .with_context(|| format!("{name} is in the PTX but not in the registry"))?;
            // The TMA wants its maps aligned.
            let text = (0..entry.tensor_maps)
                .try_fold(text, |text, i| post::align_parameter(&text, name, i, 64))?;
            Ok(post::set_bounds(&text, name, bounds(entry))?)
        })
    }

    /// Registry entries that the PTX lacks.
    fn missing(self, ptx: &str) -> Vec<&'static str> {
        let there: BTreeSet<String> = post::entry_names(ptx).into_iter().collect();
        let wanted = registry::entries()
            .filter(|entry| entry.family == self.family && entry.module == self.target.module)
            .filter(|entry| self.runs(entry.name));
        wanted.map(|entry| entry.name).filter(|name| !there.contains(*name)).collect()
    }
}

fn bounds(entry: &Entry) -> post::Bounds {
    let min_blocks = (entry.min_blocks > 0).then_some(entry.min_blocks);
    post::Bounds { max_threads: Some(entry.threads), min_blocks }
}
