//! Formats sizes and numbers.

/// Formats 65536 as `64K`, and 0 as an empty text.
pub(super) fn show(octets: u64) -> String {
    match octets {
        0 => String::new(),
        n if n.is_multiple_of(1 << 20) => format!("{}M", n >> 20),
        n if n.is_multiple_of(1 << 10) => format!("{}K", n >> 10),
        n => n.to_string(),
    }
}

/// Formats a number with about three significant digits.
pub(super) fn digits(value: f64) -> String {
    let size = value.abs();
    if size == 0.0 {
        "0".into()
    } else if size >= 100.0 {
        format!("{value:.0}")
    } else if size >= 10.0 {
        format!("{value:.1}")
    } else if size >= 1.0 {
        format!("{value:.2}")
    } else if size >= 0.01 {
        format!("{value:.3}")
    } else {
        format!("{value:.5}")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_and_numbers_are_formatted() {
        assert_eq!(
            (show(64), show(65536), show(1 << 20)),
            ("64".into(), "64K".into(), "1M".into())
        );
        assert_eq!(digits(1234.5), "1234");
        assert_eq!(digits(0.0123), "0.012");
        assert_eq!(digits(1.0), "1.00");
    }
}
