//! Network interfaces, and the settings that restrict them.

use super::{Finding, problem};
use iwarp::Device;
use iwarp_os::interfaces::{Loopback, loopback_state};
use std::ffi::OsString;

/// Lists the devices without `IWARP_BIND`.
fn all_devices() -> Result<Vec<Device>, super::Problem> {
    Device::list_as("", "").or_else(|e| problem(e.to_string(), "allow netlink sockets"))
}

fn described(devices: &[Device]) -> String {
    let one = |d: &Device| {
        let address = d.addresses.first().map(|a| a.ip.to_string());
        format!(
            "{} on {} ({})",
            d.name,
            d.interface,
            address.unwrap_or_default()
        )
    };
    devices.iter().map(one).collect::<Vec<_>>().join(", ")
}

pub(super) fn interfaces() -> Finding {
    let all = all_devices()?;
    if all.is_empty() {
        return problem(
            "no network interface is up and has an address, so there is no device",
            "`ip link set lo up` for both ends on this host, or configure another interface",
        );
    }
    let shown = Device::list().or_else(|e| problem(e.to_string(), "allow netlink sockets"))?;
    if shown.is_empty() {
        return problem(
            format!("IWARP_BIND excludes all devices: {}", described(&all)),
            "unset IWARP_BIND, or name one of their addresses or interfaces",
        );
    }
    Ok(described(&shown))
}

pub(super) fn loopback() -> Finding {
    match loopback_state() {
        Ok(Loopback::Up) => Ok("127.0.0.1 works".to_owned()),
        Ok(Loopback::Down(name)) => problem(
            format!("{name} is down, so 127.0.0.1 and ::1 cannot be reached"),
            format!("`ip link set {name} up`, as root of the network namespace"),
        ),
        Ok(Loopback::Absent) => problem(
            "there is no loopback interface",
            "use the address of another interface",
        ),
        Err(e) => problem(e.to_string(), "allow netlink sockets"),
    }
}

/// Lists the variables. The library itself warns of values that it does not understand, on standard
/// error.
pub(super) fn settings() -> Finding {
    Ok(listed(std::env::vars_os()))
}

fn listed(variables: impl Iterator<Item = (OsString, OsString)>) -> String {
    let mut set: Vec<_> = variables
        .map(|(name, value)| (name.to_string_lossy().into_owned(), value))
        .filter(|(name, value)| name.starts_with("IWARP_") && !value.is_empty())
        .map(|(name, value)| format!("{name}={}", value.to_string_lossy()))
        .collect();
    set.sort_unstable();
    match set.is_empty() {
        true => "no variable IWARP_* is set".to_owned(),
        false => set.join(", "),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_own_variables_are_listed() {
        let list = |variables: &[(&str, &str)]| {
            let pairs = variables
                .iter()
                .map(|(name, value)| (name.into(), value.into()));
            listed(pairs)
        };
        let others = [("PATH", "/bin"), ("IWARP_STAT", "")];
        assert_eq!(list(&others), "no variable IWARP_* is set");
        let set = [("IWARP_STAT", "off"), ("IWARP_BIND", "lo")];
        assert_eq!(
            list(&[others, set].concat()),
            "IWARP_BIND=lo, IWARP_STAT=off"
        );
    }
}
