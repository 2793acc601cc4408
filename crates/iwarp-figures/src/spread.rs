//! Describes repeated measurements by a few numbers.

/// Median, extremes and quartiles of a repeated measurement.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Spread {
    /// The middle value, or the mean of the middle two if the number of values is even.
    pub median: f64,
    /// The smallest value.
    pub min: f64,
    /// The largest value.
    pub max: f64,
    /// The first and the third quartile.
    pub quartiles: (f64, f64),
    /// The number of values.
    pub count: usize,
}

impl Spread {
    /// Computes the spread of values in any order. Ignores values that are not finite, and returns
    /// `None` if none remain.
    #[must_use]
    pub fn of(mut values: Vec<f64>) -> Option<Self> {
        values.retain(|value| value.is_finite());
        values.sort_unstable_by(f64::total_cmp);
        let (&min, &max) = (values.first()?, values.last()?);
        let count = values.len();
        // Interpolate between neighbouring values, as for the median of an even count.
        let quantile = |share: f64| {
            let position = share * (count - 1) as f64;
            let (low, high) = (position.floor() as usize, position.ceil() as usize);
            Some(values.get(low)? + (values.get(high)? - values.get(low)?) * position.fract())
        };
        Some(Self {
            median: quantile(0.5)?,
            min,
            max,
            quartiles: (quantile(0.25)?, quantile(0.75)?),
            count,
        })
    }

    /// Returns the spread with all values multiplied by `factor`, which must be positive.
    #[must_use]
    pub fn times(self, factor: f64) -> Self {
        Self {
            median: self.median * factor,
            min: self.min * factor,
            max: self.max * factor,
            quartiles: (self.quartiles.0 * factor, self.quartiles.1 * factor),
            count: self.count,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn medians_of_even_and_odd_counts() {
        let spread = |median, min, max, quartiles, count| Spread {
            median,
            min,
            max,
            quartiles,
            count,
        };
        assert_eq!(
            Spread::of(vec![3.0, 1.0, 2.0]),
            Some(spread(2.0, 1.0, 3.0, (1.5, 2.5), 3))
        );
        assert_eq!(
            Spread::of(vec![4.0, 1.0, f64::INFINITY, 2.0, 3.0]),
            Some(spread(2.5, 1.0, 4.0, (1.75, 3.25), 4))
        );
        assert_eq!(Spread::of(vec![f64::NAN]), None);
        assert_eq!(
            Spread::of(vec![1.0, 2.0]).unwrap().times(2.0),
            spread(3.0, 2.0, 4.0, (2.5, 3.5), 2)
        );
    }
}
