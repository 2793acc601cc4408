//! Edits siw's source: turns constants into module parameters.
//!
//! With parameters, one guest can act as every kind of peer. With default values, the driver
//! behaves like the unmodified one.

use std::path::Path;

use anyhow::{Context as _, Result, bail};

const SWITCHES: &[&str] = &[
    "try_gso",
    "mpa_crc_required",
    "mpa_crc_strict",
    "peer_to_peer",
];

/// Edits the source in `dir`.
///
/// Fails unless each constant occurs exactly once, because the edits do not apply to such a version
/// of the driver.
pub(super) fn to_parameters(dir: &Path) -> Result<()> {
    edit(&dir.join("siw.h"), |text| {
        SWITCHES.iter().try_fold(text, |text, name| {
            replace_once(
                &text,
                &format!("extern const bool {name};"),
                &format!("extern bool {name};"),
            )
        })
    })?;
    edit(&dir.join("siw_main.c"), |text| {
        let text = SWITCHES
            .iter()
            .try_fold(text, |text, name| bool_to_parameter(&text, name))?;
        let revision = "u_char mpa_version = MPA_REVISION_2;";
        replace_once(
            &text,
            revision,
            &format!("{revision}\nmodule_param(mpa_version, byte, 0444);"),
        )
    })?;
    edit(&dir.join("siw_cm.c"), |text| {
        // Bit 0: zero-length Read, bit 1: zero-length Write.
        let text = replace_once(
            &text,
            "static __be16 rtr_type = MPA_V2_RDMA_READ_RTR | MPA_V2_RDMA_WRITE_RTR;",
            "static unsigned int rtr = 3;\nmodule_param(rtr, uint, 0444);\n\
             #define rtr_type ((rtr & 1 ? MPA_V2_RDMA_READ_RTR : 0) | \
             (rtr & 2 ? MPA_V2_RDMA_WRITE_RTR : 0))",
        )?;
        replace_once(
            &text,
            "static const bool relaxed_ird_negotiation = true;",
            "static bool relaxed_ird_negotiation = true;\n\
             module_param(relaxed_ird_negotiation, bool, 0444);",
        )
    })
}

/// Turns a `bool` constant into a parameter with the same default, which is false if the constant
/// has no initializer.
fn bool_to_parameter(text: &str, name: &str) -> Result<String> {
    let parameter = format!("module_param({name}, bool, 0444);");
    let set = format!("const bool {name} = true;");
    if text.contains(&set) {
        return replace_once(text, &set, &format!("bool {name} = true;\n{parameter}"));
    }
    replace_once(
        text,
        &format!("const bool {name};"),
        &format!("bool {name};\n{parameter}"),
    )
}

fn replace_once(text: &str, from: &str, to: &str) -> Result<String> {
    match text.matches(from).count() {
        1 => Ok(text.replacen(from, to, 1)),
        n => bail!("found {n} times instead of once in siw's source: {from}"),
    }
}

fn edit(file: &Path, change: impl FnOnce(String) -> Result<String>) -> Result<()> {
    let text = std::fs::read_to_string(file).with_context(|| file.display().to_string())?;
    let text = change(text).with_context(|| file.display().to_string())?;
    std::fs::write(file, text)?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parameters_keep_default_values() {
        assert_eq!(
            bool_to_parameter("a\nconst bool x = true;\n", "x").unwrap(),
            "a\nbool x = true;\nmodule_param(x, bool, 0444);\n"
        );
        assert_eq!(
            bool_to_parameter("const bool x;\nconst bool xy;\n", "x").unwrap(),
            "bool x;\nmodule_param(x, bool, 0444);\nconst bool xy;\n"
        );
        assert!(bool_to_parameter("const bool y;", "x").is_err());
        assert!(replace_once("aa", "a", "b").is_err());
    }
}
