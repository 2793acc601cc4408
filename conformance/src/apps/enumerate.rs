//! Programs that list and watch devices.

use anyhow::{Result, bail};
use rustix::process::Signal;

use super::case::{Case, Verdict, expect, expect_lines};
use super::stage::Stage;

/// The cases of this file.
pub(super) fn cases() -> Vec<Case> {
    let needs: &[&str] = &["ibverbs-utils"];
    vec![
        Case::new("ibv_devices", "no options", devices).needs(needs),
        Case::new("ibv_devinfo", "`-v`", devinfo).needs(needs),
        Case::new("ibv_asyncwatch", "`-d iwarp0`", asyncwatch).needs(needs),
    ]
}

/// The list has the device of 127.0.0.1, and no device twice.
fn devices(stage: &Stage) -> Result<Verdict> {
    let said = stage.start(&["ibv_devices"])?.success()?;
    let names: Vec<&str> = said
        .lines()
        .filter_map(|line| line.split_whitespace().next())
        .filter(|word| word.starts_with("iwarp"))
        .collect();
    if !names.contains(&"iwarp0") {
        bail!("iwarp0 is not in the list");
    }
    for (at, name) in names.iter().enumerate() {
        if names[..at].contains(name) {
            bail!("{name} is in the list twice");
        }
    }
    Ok(Verdict::passed(format!("{} devices", names.len())))
}

fn devinfo(stage: &Stage) -> Result<Verdict> {
    let said = stage.start(&["ibv_devinfo", "-v"])?.success()?;
    let devices = said
        .lines()
        .filter(|line| line.starts_with("hca_id:"))
        .count();
    if devices == 0 {
        bail!("no device");
    }
    // Each device has one port, so each of these texts occurs once for each device.
    for text in [
        "iWARP (1)",
        "PORT_ACTIVE (4)",
        "link_layer:",
        "phys_port_cnt:",
    ] {
        expect_lines(&said, text, devices)?;
    }
    expect(&said, "::ffff:127.0.0.1")?;
    Ok(Verdict::passed(format!("{devices} devices, active")))
}

/// The program waits for events. There are none, so it must still run when it is interrupted.
fn asyncwatch(stage: &Stage) -> Result<Verdict> {
    let mut watch = stage.start(&["stdbuf", "-oL", "ibv_asyncwatch", "-d", "iwarp0"])?;
    watch.wait_for("async event FD")?;
    std::thread::sleep(std::time::Duration::from_millis(300));
    if let Some(status) = watch.poll()? {
        bail!("ended by itself: {status}");
    }
    watch.signal(Signal::INT);
    Ok(Verdict::passed("waits for events"))
}
