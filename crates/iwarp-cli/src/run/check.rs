//! `iwarp run --check -- PROGRAM`: prints which libraries the program would load, and from where.
//!
//! The answer comes from the program's own loader: with `LD_TRACE_LOADED_OBJECTS` it loads
//! everything, asks the audit library, prints the paths and exits, as for ldd(1). No code of the
//! program runs.

use super::inspect::Program;
use super::library::{Libraries, Verbs};
use iwarp_cli_common::error::{Context as _, Error, Result};
use iwarp_cli_common::out::line;
use std::ffi::{OsStr, OsString};
use std::path::{Path, PathBuf};
use std::process::Command;

/// Prints the report.
///
/// # Errors
/// Fails if the program cannot be inspected, or if it would not load our libraries.
pub(super) fn report(
    command: &[OsString],
    libraries: &Libraries,
    variables: &[(&'static str, OsString)],
) -> Result<()> {
    let name = command.first().map(Path::new).unwrap_or(Path::new(""));
    let Some(program) = Program::find(command) else {
        return Err(Error::failed(format!(
            "{} is neither a program nor a script that can be executed",
            name.display()
        )));
    };
    for script in &program.scripts {
        line(format_args!("script       {}", script.display()));
    }
    line(format_args!("program      {}", program.file.display()));
    let elf = &program.elf;
    let loader = elf.loader.as_deref().map(Path::display);
    match &loader {
        Some(loader) => line(format_args!("loader       {loader}")),
        None => line(format_args!("loader       none")),
    }
    for (what, text) in [("DT_RPATH", &elf.rpath), ("DT_RUNPATH", &elf.runpath)] {
        if let Some(text) = text {
            line(format_args!("{what:<12} {}", text.display()));
        }
    }
    for library in &elf.needed {
        line(format_args!("DT_NEEDED    {}", library.display()));
    }
    if let Some(obstacle) = program.obstacle() {
        return Err(Error::failed(format!(
            "{} cannot load iwarp's libraries: {obstacle}",
            name.display()
        )));
    }
    let loaded = trace(&program, variables)?;
    for path in &loaded {
        line(format_args!("loads        {path}"));
    }
    check_verbs(name, &loaded, libraries)
}

/// Runs the loader. Returns a line for each library.
fn trace(program: &Program, variables: &[(&'static str, OsString)]) -> Result<Vec<String>> {
    let output = Command::new(&program.file)
        .envs(variables.iter().map(|(name, value)| (name, value)))
        .env("LD_TRACE_LOADED_OBJECTS", "1")
        .output()
        .context(program.file.display())?;
    let text = String::from_utf8_lossy(&output.stdout);
    let loaded: Vec<String> = text.lines().map(without_address).collect();
    if !output.status.success() {
        let errors = String::from_utf8_lossy(&output.stderr);
        return Err(Error::failed(format!(
            "the loader fails for {}: {}",
            program.file.display(),
            errors.trim()
        )));
    }
    Ok(loaded)
}

/// Removes the address at the end of a line from the loader.
fn without_address(text: &str) -> String {
    let text = text.trim();
    let end = text.rfind(" (0x").unwrap_or(text.len());
    text[..end].to_owned()
}

/// Checks that the verbs libraries are ours, and prints the result.
fn check_verbs(name: &Path, loaded: &[String], libraries: &Libraries) -> Result<()> {
    let name = name.display();
    let missing = loaded.iter().find(|text| text.ends_with("=> not found"));
    if let Some(missing) = missing {
        return Err(Error::failed(format!("{name} cannot be loaded: {missing}")));
    }
    let ours = verbs_path(libraries);
    let path = |text: &String| PathBuf::from(text.rsplit("=> ").next().unwrap_or(text));
    let verbs: Vec<PathBuf> = loaded
        .iter()
        .map(path)
        .filter(|path| path.file_name().is_some_and(is_verbs) || is_same_file(path, &ours))
        .collect();
    if let Some(other) = verbs.iter().find(|path| !is_same_file(path, &ours)) {
        return Err(Error::failed(format!(
            "{name} would load {}, which is not iwarp's library",
            other.display()
        )));
    }
    match (verbs.is_empty(), &libraries.audit) {
        (false, _) => line(format_args!("libibverbs and librdmacm are iwarp's")),
        (true, Some(_)) => line(format_args!(
            "{name} is linked with neither libibverbs nor librdmacm; if it loads them at run time, \
             it gets {}",
            ours.display()
        )),
        (true, None) => line(format_args!(
            "{name} is linked with neither libibverbs nor librdmacm"
        )),
    }
    Ok(())
}

/// Returns `true` for file names of libibverbs and librdmacm.
fn is_verbs(name: &OsStr) -> bool {
    let name = name.as_encoded_bytes();
    [&b"libibverbs"[..], b"librdmacm"]
        .iter()
        .any(|stem| matches!(name.strip_prefix(*stem), Some([b'.' | b'-', ..])))
}

/// Returns the path of our verbs library.
pub(super) fn verbs_path(libraries: &Libraries) -> PathBuf {
    match &libraries.verbs {
        Verbs::Folder(folder) => folder.join("libibverbs.so.1"),
        Verbs::Memory { files, .. } => files[0].clone(),
    }
}

/// Returns `true` if both paths lead to the same file.
fn is_same_file(one: &Path, other: &Path) -> bool {
    let key = |path: &Path| {
        use std::os::unix::fs::MetadataExt as _;
        let meta = std::fs::metadata(path).ok()?;
        Some((meta.dev(), meta.ino()))
    };
    one == other || (key(one).is_some() && key(one) == key(other))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn loader_lines_lose_their_addresses() {
        for (text, wanted) in [
            ("\tlinux-vdso.so.1 (0x00007f16f8764000)", "linux-vdso.so.1"),
            (
                "\tlibc.so.6 => /usr/lib/libc.so.6 (0x0000700000000000)",
                "libc.so.6 => /usr/lib/libc.so.6",
            ),
            ("\tlibx.so => not found", "libx.so => not found"),
        ] {
            assert_eq!(without_address(text), wanted);
        }
    }

    #[test]
    fn private_copies_are_verbs_libraries() {
        for name in ["libibverbs.so.1", "librdmacm-ab.so.1", "libibverbs.so"] {
            assert!(is_verbs(name.as_ref()), "{name}");
        }
        assert!(!is_verbs("libibverbs_x.so".as_ref()) && !is_verbs("libmlx5.so".as_ref()));
    }
}
