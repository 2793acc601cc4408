//! Parses and formats sizes and rates.

/// Parses `4`, `64K`, `64KiB`, `1M` … (binary multiples) into bytes.
///
/// # Errors
/// Returns a message that quotes the invalid text.
pub fn parse_size(text: &str) -> Result<u64, String> {
    let t = text.trim();
    let digits = t.len() - t.trim_start_matches(|c: char| c.is_ascii_digit()).len();
    let (number, suffix) = t.split_at(digits);
    let number: u64 = number
        .parse()
        .map_err(|_| format!("'{text}' is not a size; write for example 4, 64K or 1M"))?;
    let shift = match suffix.to_ascii_lowercase().as_str() {
        "" | "b" => 0,
        "k" | "kb" | "kib" => 10,
        "m" | "mb" | "mib" => 20,
        "g" | "gb" | "gib" => 30,
        _ => {
            return Err(format!(
                "'{suffix}' is not a size suffix; use K, M or G (1024, 1024², 1024³)"
            ));
        }
    };
    number
        .checked_mul(1 << shift)
        .ok_or_else(|| format!("'{text}' is too large"))
}

/// Formats a size, such as `1500 B` or `64 KiB`, in the largest unit of which it is a multiple.
pub fn size(octets: u64) -> String {
    for (shift, unit) in [(30, "GiB"), (20, "MiB"), (10, "KiB")] {
        if octets >> shift > 0 && octets.trailing_zeros() >= shift {
            return format!("{} {unit}", octets >> shift);
        }
    }
    format!("{octets} B")
}

/// Formats a number with at least three significant digits: all digits before the decimal point,
/// and at most six after it. There is no exponent.
pub fn digits3(v: f64) -> String {
    if !v.is_finite() {
        return "–".to_owned();
    }
    let places = if v == 0.0 {
        0
    } else {
        (2 - v.abs().log10().floor() as i32).clamp(0, 6) as usize
    };
    format!("{v:.places$}")
}

/// Formats bytes per second in decimal units.
pub fn rate(octets_per_s: f64) -> String {
    scaled(octets_per_s, "B/s")
}

/// Formats messages per second.
pub fn message_rate(per_s: f64) -> String {
    scaled(per_s, "/s")
}

fn scaled(v: f64, unit: &str) -> String {
    let (div, prefix) = match v {
        v if v >= 1e9 => (1e9, "G"),
        v if v >= 1e6 => (1e6, "M"),
        v if v >= 1e3 => (1e3, "k"),
        _ => (1.0, ""),
    };
    format!("{} {prefix}{unit}", digits3(v / div))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_are_parsed_and_formatted() {
        for (text, n) in [
            ("4", 4),
            ("64K", 65536),
            ("64kib", 65536),
            ("1M", 1 << 20),
            (" 2 ".trim(), 2),
            ("3g", 3 << 30),
        ] {
            assert_eq!(parse_size(text), Ok(n), "{text}");
        }
        for bad in [
            "",
            "K",
            "-4",
            "4X",
            "1.5M",
            "99999999999999999999",
            "18446744073709551615K",
        ] {
            assert!(parse_size(bad).is_err(), "{bad}");
        }
        assert_eq!(size(4), "4 B");
        assert_eq!(size(65536), "64 KiB");
        assert_eq!(size(1 << 20), "1 MiB");
        assert_eq!(size(1500), "1500 B");
        assert_eq!(size(0), "0 B");
    }

    #[test]
    fn numbers_have_three_digits() {
        assert_eq!(digits3(0.8254), "0.825");
        assert_eq!(digits3(3.386), "3.39");
        assert_eq!(digits3(62.71), "62.7");
        assert_eq!(digits3(1401.9), "1402");
        assert_eq!(digits3(f64::NAN), "–");
        assert_eq!(rate(4.52e9), "4.52 GB/s");
        assert_eq!(message_rate(390_000.0), "390 k/s");
    }
}
