//! Tests of the bounds, keys and rights of regions.

use super::*;
use crate::{Config, Device};
use iwarp_rnic::Access;

#[test]
fn bounds_are_checked_everywhere() {
    let device = Device::by_address("127.0.0.1".parse().unwrap()).unwrap();
    let ctx = Context::open(&device, Config::default()).unwrap();
    let pd = ProtectionDomain::new(&ctx);
    let mr = pd.reg_mr(64, Access::LOCAL_WRITE).unwrap();
    mr.write_at(60, &[1, 2, 3, 4]).unwrap();
    assert_eq!(mr.to_vec(60..).unwrap(), [1, 2, 3, 4]);
    assert!(mr.write_at(61, &[0; 4]).is_err());
    assert!(mr.read_at(usize::MAX, &mut [0; 4]).is_err());
    assert!(mr.load_u8(64).is_err() && mr.load_u8(63).unwrap() == 4);
    assert!(mr.load_u64(1).is_err() && mr.load_u64(64).is_err());
    assert!(mr.sge(0..65).is_err() && mr.sge(..).unwrap().len == 64);
    let back = RemoteMemory::from_bytes(&mr.remote().to_bytes()).unwrap();
    assert_eq!(back, mr.remote());
    assert!(back.slice(60, 5).is_none() && back.slice(60, 4).is_some());
    assert!(matches!(
        pd.reg_mr(8, Access::REMOTE_WRITE),
        Err(Error::Memory(_))
    ));
    let stag = mr.lkey();
    drop(mr);
    assert!(ctx.region(stag).is_none());
}

/// Tagged offsets of a zero-based region begin at zero, for local elements and for peers.
#[test]
fn zero_based_region_starts_at_zero() {
    let device = Device::by_address("127.0.0.1".parse().unwrap()).unwrap();
    let ctx = Context::open(&device, Config::default()).unwrap();
    let pd = ProtectionDomain::new(&ctx);
    for zero_based in [Access::empty(), Access::ZERO_BASED] {
        let rights = Access::LOCAL_WRITE | Access::REMOTE_READ | Access::REMOTE_WRITE;
        let mr = pd.reg_mr(64, rights | zero_based).unwrap();
        let iova = ctx.region(mr.lkey()).unwrap().iova;
        assert_eq!(iova == 0, !zero_based.is_empty());
        assert_eq!(mr.remote().addr, iova);
        assert_eq!(mr.sge(5..9).unwrap().addr, iova + 5);
    }
}
